"""Numbers of steps or ranks in an option or a variable of the environment."""

import re


def numbers_of(text: str, what: str = "steps") -> list[int]:
    """Return the numbers that a text names: "0,1", "0-9", "0-3,7".

    Raises:
        ValueError: the text is anything else.
    """
    found: list[int] = []
    for word in text.split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", word.strip())
        if bounds is None or int(bounds[1]) > int(bounds[2] or bounds[1]):
            raise ValueError(f"{what} must be like 0,1 or 0-9 or 5, and not {text!r}")
        found += range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
    return found
