"""The populations on which every metric is tried, and what each is for."""

from __future__ import annotations

from typing import Any, NamedTuple

from populations import NEWEST, OLDEST, UNEQUAL, Population

UNTRAINED: dict[str, Any] = {"first": (0.0, 0.0)}
UNEVEN: dict[str, Any] = {"common": 1.5, "own": 1.5, "lengths": UNEQUAL}
"""Documents that differ much, in length too."""


class Scenario(NamedTuple):
    """A population, what is planted, and the metrics whose null it fulfils."""

    population: Population
    planted: str
    nulls: tuple[str, ...] = ()


STRENGTH = ("mutual_information", "eta_squared", "proxy_information[0]", "proxy_information[1]")
EXCESS = ("mutual_information_excess", "eta_squared_excess")
PLACE = ("recency", "recency_teacher", "excess_recency")
ALIKE = ("kappa", "positional", "content", "fixed_choice", "stability")
TWINS = ("twin[0]", "twin[1]")
FOUND = ("recall_excess", "coverage_over_random", "sink_excess")
HEADS = ("kappa_heads", "group_information", "group_information_excess")
EQUAL_HEADS = (0.0,) * 16
"""In two groups: 6,435 groupings, so that a test over them can reject at 5 %; eight heads have 35 and cannot."""

SCENARIOS = {
    "random": Scenario(
        Population(**UNTRAINED, heads=EQUAL_HEADS),
        "uniform choice, no document like another",
        (*STRENGTH, *PLACE, *ALIKE, *TWINS, *FOUND, *HEADS),
    ),
    "random, unequal lengths": Scenario(
        Population(**UNTRAINED, heads=EQUAL_HEADS, lengths=UNEQUAL),
        "the same in documents of 13 to 24 blocks",
        (*STRENGTH, *PLACE, *ALIKE, *TWINS, *FOUND, *HEADS),
    ),
    "alike but uneven": Scenario(
        Population(**UNTRAINED, **UNEVEN, heads=EQUAL_HEADS),
        "every document leans its own way, every proxy in it too, on the whole none differs from another",
        (*STRENGTH, *PLACE, "group_information", "group_information_excess"),
    ),
    "alike, four proxies": Scenario(
        Population(lean=(1.0,) * 4, **UNEVEN), "the same, leaning to the near, four proxies", STRENGTH
    ),
    "newest": Scenario(Population(lean=(NEWEST, NEWEST)), "always the newest blocks"),
    "oldest": Scenario(Population(lean=(OLDEST, OLDEST)), "always the oldest blocks"),
    "fixed stride": Scenario(
        Population(copy=(1.0, 0.0), source="place", first=(2.0, 2.0)), "always the blocks 4 and 8 back"
    ),
    "near and far, weak": Scenario(
        Population(lean=(0.5, -0.5), **UNTRAINED, **UNEVEN), "one proxy leans to the near, one to the far"
    ),
    "near and far": Scenario(
        Population(lean=(1.5, -1.5), **UNTRAINED, **UNEVEN, heads=(2.5, 2.0, 1.5, 1.0, -1.0, -1.5, -2.0, -2.5)),
        "the same, three times as strong; heads differ more than proxies",
    ),
    "near and far, strong": Scenario(
        Population(lean=(4.0, -4.0), **UNTRAINED, **UNEVEN), "the same, eight times as strong"
    ),
    "same places, other content": Scenario(
        Population(lean=(3.0, 3.0), own=0.5, lengths=UNEQUAL, first=(3.0, 3.0)),
        "two proxies with the same distances choose each for itself: overlap is positional alone",
        (*STRENGTH, "excess_recency", "content"),
    ),
    "other places, same content": Scenario(
        Population(lean=(2.0, -2.0), common=0.7, own=0.7, lengths=UNEQUAL, copy=(3.0, 3.0), **UNTRAINED),
        "one near, one far, but half of the rows are copied from one draw of the document",
    ),
    "same stride": Scenario(
        Population(copy=(3.0, 3.0), source="place", lengths=UNEQUAL, **UNTRAINED),
        "half of the rows are copied from a place that is alike in all documents, more in some than in others",
    ),
    "teacher followed": Scenario(
        Population(teacher=(2.0, -2.0), common=1.0, own=1.0, copy=(3.0, 2.0), source="teacher", lengths=UNEQUAL),
        "three rows in five are the teacher's",
    ),
    "one collapsed": Scenario(
        Population(lean=(NEWEST, 1.0, 0.0, -1.0), own=1.0, lengths=UNEQUAL), "the first of four proxies never looks"
    ),
    "long documents differ": Scenario(
        Population(lean=(1.0, -1.0), common=1.0, own=1.0, trend=3.0, lengths=UNEQUAL, **UNTRAINED),
        "long documents lean to the near, and have six times the rows",
    ),
    "one near, one random": Scenario(
        Population(lean=(2.0, 0.0), lengths=UNEQUAL),
        "one proxy leans to the near and the other chooses uniformly: alike by nothing, though documents differ in it",
        ("kappa", "positional", "content"),
    ),
    "different from the start": Scenario(
        Population(lean=(1.0, -1.0), first=(1.0, -1.0), **UNEVEN),
        "one near, one far, at the earlier record as well",
        (*EXCESS, *(f"emergence[{name}]" for name in EXCESS)),
    ),
    "emerges": Scenario(
        Population(lean=(3.0, -3.0), first=(1.0, -1.0), records=(3, 2), **UNEVEN),
        "one near, one far, and from the fourth record (step 300) three times as much as before",
    ),
    "twins": Scenario(
        Population(lean=(1.0, 1.0, -1.0), common=0.7, copy=(60.0, 1.0), copiers=(0, 1), lengths=UNEQUAL),
        "two of three proxies choose the same blocks in nearly every row; the third chooses for itself",
    ),
}

FEW = SCENARIOS["near and far"].population
"""Tried with few documents, and with other strengths for the power."""
STRENGTHS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.5)
"""Lean of the one proxy, and minus that of the other."""
