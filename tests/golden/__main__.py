"""Write the golden texts anew: `python -m tests.golden`. Read the difference before you keep it."""

from tests.golden.cases import PLANS, path_of, text_of


def main() -> None:
    for case in PLANS:
        path_of(case).write_text(text_of(case), encoding="ascii")


main()
