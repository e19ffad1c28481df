"""Explanation: the table of what becomes of what, exact for few tensors and short for many."""

from collections.abc import Mapping

from shardwise.rewrite import Rewrite


def test_the_table_shows_each_box_and_what_is_done_with_it() -> None:
    text = """q^T, k -> qk, axis=1
        a -> b, dtype='float16'
        w -> w1, w2, axis=1
        p -> p2, permute='[1,2,0]'
        r -> r2, reshape='[2,6]'
        c -> _
        _ -> n
        s -> s2
        y -> y2, pad='[6,-1]', fill='-inf', dtype='bfloat16'
        x -> x2, crop='[-1,2]', fill=3"""
    sources = {
        "q": (2, 3),
        "k": (3, 4),
        "a": (4,),
        "w": (2, 4),
        "p": (2, 3, 4),
        "r": (4, 3),
        "c": (2,),
        "s": (),
        "z": (0, 2),
        "y": (4, 3),
        "x": (2, 3),
    }
    assert Rewrite(text).explain(sources) == "\n".join(
        [
            "target  box              source  box              operations",
            "z       [0:0, 0:2]                                no elements",
            "qk      [0:3, 0:2]       q       [0:2, 0:3]       transpose",
            "qk      [0:3, 2:6]       k       [0:3, 0:4]",
            "b       [0:4]            a       [0:4]            float32 -> float16",
            "w1      [0:2, 0:2]       w       [0:2, 0:2]",
            "w2      [0:2, 0:2]       w       [0:2, 2:4]",
            "p2      [0:3, 0:4, 0:2]  p       [0:2, 0:3, 0:4]  permute [1, 2, 0]",
            "r2      [0:1, 0:6]       r       [0:2, 0:3]       reshape",
            "r2      [1:2, 0:6]       r       [2:4, 0:3]       reshape",
            "s2      []               s       []",
            "y2      [0:4, 0:3]       y       [0:4, 0:3]       float32 -> bfloat16",
            "y2      [4:6, 0:3]                                fill -inf, float32 -> bfloat16",
            "x2      [0:2, 0:2]       x       [0:2, 0:2]",
            "n                                                 added: keeps its value",
            "                         c       [0:2]            dropped",
            "note: line 10, `x -> x2, crop='[-1,2]', fill=3`, crops x from [2, 3] to [2, 2]: the way back fills them "
            "with 3, whatever the elements were",
        ]
    )


def test_ties_are_shown() -> None:
    checked = Rewrite("embed -> e").check({"embed": (2,)}, aliases={"head": "embed"})
    assert checked.explain().split("\n")[1:] == [
        "e       [0:2]  embed   [0:2]",
        "head                          tied to e",
    ]


def rows(text: str, sources: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """The cells of each row, but for the boxes."""
    lines = Rewrite(text).explain(sources).split("\n")[1:]
    return [[cell.strip() for cell in line.split("  ") if cell.strip() and "[" not in cell] for line in lines]


def test_what_differs_stays_apart() -> None:
    sources = {f"l.{layer}.w": (2, 3 if layer == 20 else 2) for layer in range(60)} | {
        "l.70.w": (2, 2),
        "l.007.w": (2, 2),
    }
    found = rows("l.$L.w -> m.$L.w", sources)
    assert found == [
        ["m.{0..19}.w", "l.{0..19}.w"],
        ["m.{21..59}.w", "l.{21..59}.w"],
        ["m.70.w", "l.70.w"],
        ["m.20.w", "l.20.w"],
        ["m.007.w", "l.007.w"],
    ]


def test_numbers_that_change_places_are_not_folded_wrongly() -> None:
    sources = {f"l.{a}.{b}": (2,) for a in range(7) for b in range(7)}
    found = rows("l.$A.$B -> m.$B.$A", sources)
    assert found == [[f"m.{b}.{{0..6}}", f"l.{{0..6}}.{b}"] for b in range(7)]


def test_copies_of_one_tensor_are_folded() -> None:
    checked = Rewrite("w -> v.$L; x -> x").check(
        {"w": (2,), "x": (1,)}, {f"v.{at}": (2,) for at in range(50)} | {"x": (1,)}
    )
    assert checked.explain().split("\n")[1:] == ["x          [0:1]  x       [0:1]", "v.{0..49}  [0:2]  w       [0:2]"]
