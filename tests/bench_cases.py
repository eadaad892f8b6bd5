"""What tests of the bench time."""

from octavo.tools.shapes import Case, make_case


def preset(name: str, **options) -> Case:
    given = {"layers": None, "tokens": None, "seq": None, "seed": 0, "device": "cpu", "force": True, **options}
    return make_case(preset=name, config=None, **given)
