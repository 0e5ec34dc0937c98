"""Records of every kind, for laws that hold for all of them."""

from __future__ import annotations

from hypothesis import strategies as st

from gradtrack.records import Histogram, Panel, Record

texts = st.text(max_size=20)
numbers = st.floats(allow_nan=True, allow_infinity=True)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
panels = st.builds(
    Panel,
    title=texts,
    section=texts,
    metrics=st.lists(texts, max_size=3).map(tuple),
    kind=st.sampled_from(["line", "multi-line", "band", "image", "text"]),
    log_scale=st.booleans(),
)
columns = st.lists(numbers, max_size=4).map(tuple)
records = st.builds(
    Record,
    step=st.integers(-(2**63), 2**63 - 1),
    time=st.floats(0, 4e9),
    metrics=st.dictionaries(texts.filter(bool), numbers, max_size=6),
    epoch=st.none() | st.integers(-5, 2**40),
    loss=st.none() | numbers,
    source=texts,
    panels=st.lists(panels, max_size=2).map(tuple),
    issues=st.lists(st.dictionaries(texts, plain, max_size=3), max_size=2).map(tuple),
    histograms=st.dictionaries(texts, st.builds(Histogram, edges=columns, counts=columns), max_size=2),
)
