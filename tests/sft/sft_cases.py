"""The options of a small run, and the chat template of its tokenizer."""

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OPTIONS = ["--rank", "4", "--batch", "4", "--lr", "0.01", "--sample-tokens", "2", "--device", "cpu"]
