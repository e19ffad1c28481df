"""Write the golden texts anew: `python -m tests.golden`. Read the difference before you keep it."""

from tests.golden.cases import PLANS, path_of, text_of
from tests.golden.surfaces import TEXTS
from tests.refusals import FOLDER, tables


def main() -> None:
    for case in PLANS:
        path_of(case).write_text(text_of(case), encoding="ascii")
    for name, text in TEXTS.items():
        path_of(name).write_text(text(), encoding="utf-8")
    for each in FOLDER.glob("*.json"):
        each.unlink()
    for table in tables():
        table.write()


main()
