"""Train BDH in FP8 on the source of Python's standard library: `python examples/train.py`.

The same job as `octavo train`, as a script to copy and change. Change a constant here, or set an environment variable
of its name, as in `FP8_FORMAT=e4m3 MAX_STEPS=50 python examples/train.py`.
"""

import os
from contextlib import nullcontext

import torch

from octavo import FP8TrainingConfig, check_fp8_support, get_fp8_autocast_context
from octavo.models import BDH, BDHConfig
from octavo.optim import build_optimizer
from octavo.training.data import get_batch, load_data

ON_GPU = torch.cuda.is_available()

USE_FP8 = os.environ.get("USE_FP8", "1").lower() in ("1", "true", "yes", "on")
FP8_FORMAT = os.environ.get("FP8_FORMAT", "hybrid")  # hybrid, e4m3 or e5m2
FP8_AMAX_HISTORY_LEN = int(os.environ.get("FP8_AMAX_HISTORY_LEN", "32"))
FP8_AMAX_COMPUTE_ALGO = os.environ.get("FP8_AMAX_COMPUTE_ALGO", "max")  # max, most_recent or ema
USE_4BIT_OPTIMIZER = os.environ.get("USE_4BIT_OPTIMIZER", "0").lower() in ("1", "true", "yes", "on")
COMPUTE_DTYPE = getattr(torch, os.environ.get("COMPUTE_DTYPE", "bfloat16" if ON_GPU else "float32"))
LEARNING_RATE = float(os.environ.get("LEARNING_RATE", "3e-3" if not ON_GPU else "1e-3"))
MODEL_SIZE = os.environ.get("MODEL_SIZE", "100m" if ON_GPU else "tiny")
MAX_STEPS = int(os.environ.get("MAX_STEPS", "100"))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", "8"))
SEQUENCE = int(os.environ.get("SEQUENCE", "512" if ON_GPU else "128"))
SAMPLE_BYTES = int(os.environ.get("SAMPLE_BYTES", "100"))
DATA = os.environ.get("DATA")  # a file, a folder or a pattern; not set: the standard library


def main() -> None:
    device = torch.device("cuda" if ON_GPU else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    model = BDH(BDHConfig.preset(MODEL_SIZE)).to(device)

    fp8 = nullcontext()
    if USE_FP8:
        config = FP8TrainingConfig(
            fp8_format=FP8_FORMAT,
            amax_history_len=FP8_AMAX_HISTORY_LEN,
            amax_compute_algo=FP8_AMAX_COMPUTE_ALGO,
        )
        fp8 = get_fp8_autocast_context(config, model=model)  # one for the whole run: it holds the scaling histories
        print(f"FP8 training enabled with format: {FP8_FORMAT.lower()}")
    print(f"Using device: {device} with dtype {COMPUTE_DTYPE}")
    if USE_FP8 and not check_fp8_support(device):
        print(f"FP8 products are emulated: {check_fp8_support(device).reason}")

    optimizer = build_optimizer("adamw4bit" if USE_4BIT_OPTIMIZER else "adamw", model.parameters(), lr=LEARNING_RATE)
    data = load_data(DATA, sequence=SEQUENCE)
    print(f"Data: {data}")

    for step in range(1, MAX_STEPS + 1):
        tokens, targets = get_batch(data.train, seed=0, step=step, micro_batch=0, batch=BATCH_SIZE, sequence=SEQUENCE)
        with torch.autocast(device.type, COMPUTE_DTYPE, enabled=COMPUTE_DTYPE is not torch.float32), fp8:
            _, loss = model(tokens.to(device), targets.to(device))
        loss.backward()  # outside the context: FP8 products know their own backward
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()  # the scaling histories roll here
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}")

    if USE_FP8:
        print(fp8.report.summary())
    prompt = torch.tensor([list(b"def ")], device=device)
    print(
        bytes(model.generate(prompt, SAMPLE_BYTES, temperature=0.8, context=SEQUENCE)[0].tolist()).decode(
            errors="replace"
        )
    )


if __name__ == "__main__":
    main()
