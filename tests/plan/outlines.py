"""Outlines of models that tests write down or draw."""

from dataclasses import replace

from hypothesis import strategies as st

from shardwise.plan import Outline

Tree = dict[str, "int | Tree"]


def model(tree: Tree, *, kind: str = "Net") -> Outline:
    """The outline of a model written as nested dicts.

    A number is a module with one parameter `weight` of so many elements (0: none); in a dict, a key that begins with
    "." is a parameter of the module itself, and one that ends with "[]" is a container.
    """
    return _outline("", tree, kind)


def _outline(name: str, tree: "int | Tree", kind: str = "Module", is_container: bool = False) -> Outline:
    prefix = f"{name}." if name else ""
    if isinstance(tree, int):
        own = ((f"{prefix}weight", tree),) if tree else ()
        return Outline(name=name, kind=kind, own_parameters=own)
    modules = {key: each for key, each in tree.items() if not key.startswith(".")}
    return Outline(
        name=name,
        kind=kind,
        is_container=is_container,
        children=tuple(
            _outline(prefix + key.removesuffix("[]"), each, is_container=key.endswith("[]"))
            for key, each in modules.items()
        ),
        own_parameters=tuple(
            (prefix + key[1:], each) for key, each in tree.items() if key.startswith(".") and isinstance(each, int)
        ),
    )


def layers(*sizes: int) -> Tree:
    """Modules called "0", "1" and so on, with so many elements."""
    return {str(at): size for at, size in enumerate(sizes)}


def shared_embedding() -> Outline:
    """An encoder and a decoder that both hold the one embedding of the model, under names of their own."""
    tree: Tree = {"shared": 8, "encoder": {"embed": 0, "blocks[]": layers(9, 9)}, "decoder": {"blocks[]": layers(9, 9)}}
    root = model({**tree, "head": 1})
    shared = replace(root.children[0], aliases=("encoder.embed", "decoder.embed"))
    encoder = replace(root.children[1], children=root.children[1].children[1:])  # the alias is not listed again
    return replace(root, children=(shared, encoder, *root.children[2:]))


_keys = st.sampled_from(["a", "b", "c", "[d]", "e[]"])
trees: st.SearchStrategy[Tree] = st.recursive(
    st.dictionaries(_keys.filter(lambda key: key != "e[]"), st.integers(0, 9), min_size=1, max_size=4),
    lambda inner: st.dictionaries(_keys, inner, max_size=4).flatmap(
        lambda tree: st.dictionaries(st.sampled_from([".p", ".q"]), st.integers(0, 9), max_size=2).map(
            lambda own: {**own, **tree}
        )
    ),
    max_leaves=12,
)
