"""What happens while training: when a property emerges, and whether a proxy has collapsed."""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

from msa_analysis.estimate import table, tallied
from msa_analysis.overlaps import PAIRS, fixed_choice, overlap
from msa_analysis.profiles import never_selected

ALIKE = 0.9
"""Kappa above which a choice counts as the same choice."""
UNUSED = 0.5
"""Share of never chosen blocks above which a proxy counts as narrow."""
EMERGING = ("mutual_information_excess", "eta_squared_excess", "recall_excess", "coverage_over_window", "content")


def emergence(history: pd.DataFrame, metrics: Sequence[str] = EMERGING) -> pd.DataFrame:
    """Since when: the first record from which a metric's whole interval stays above its null to the end.

    `history` is what `dynamics` gave. Metric `emergence`, column `of` names the metric that emerged; a row for each and
    layer (layer missing: the mean over layers). `value` is that record's step, `high` the same and `low` the step of
    the record before it: between the two it happened (no confidence interval; the first record has none before it).
    Where the last record is not above the null: not defined. No correction is made for the number of records: a
    property has to hold in all later ones.
    Null: nothing emerged. A step is then named where the last interval is above by chance, nominally in 2.5 % of runs
    (one end of a 95 % interval); as often the record before the right one is. A property too weak for the documents is
    found late. Proof: `experiments/planted`, where `coverage` is how often the right step is named.
    """
    rows = []
    for (metric, layer), part in history[history["metric"].isin(metrics)].groupby(["metric", "layer"], dropna=False):
        part = part.sort_values("step")
        steps, above = part["step"].to_numpy(), (part["low"] > part["null"]).to_numpy()
        below = np.flatnonzero(~above)
        start = below[-1] + 1 if len(below) else 0
        row = {"metric": "emergence", "of": metric, "layer": layer, "null": np.nan, "reason": ""}
        row |= {name: part[name].iloc[-1] for name in ("step", "phase", "documents") if name in part}
        if start < len(steps):
            row |= {"value": steps[start], "low": steps[max(start - 1, 0)], "high": steps[start]}
        else:
            last = part["reason"].iloc[-1]
            row |= dict.fromkeys(("value", "low", "high"), np.nan) | {"reason": last or "not above its null at the end"}
        rows.append(row)
    columns = ["metric", "of", "step", "phase", "layer", "value", "low", "high", "null", "documents", "reason"]
    return pd.DataFrame(rows, columns=[name for name in columns if name != "phase" or "phase" in history])


def collapse(data: xr.Dataset) -> pd.DataFrame:
    """Has a proxy stopped choosing? A row a record, layer and proxy for each of four metrics.

    `fixed_choice`: kappa of the proxy with itself at the same position of other documents. `twin`: its largest kappa
    with another proxy of the layer (null 0), with the interval of that pair; where n others are about as much alike the
    largest estimate is too large, by 0.6 (n = 2) to 1.4 (n = 7) of its standard errors at most. `never_selected`: share
    of blocks that it could choose and never does. `collapse`: the alarm, 1 or 0. It goes off where the whole interval
    of `fixed_choice` lies above 0.9 (the choice heeds the position alone), or that of `twin` does (the choice is
    another proxy's), or that of `never_selected` lies above 0.5 and above its null (few blocks are ever chosen). Column
    `because` names which. The alarm is not defined where no part of the rule is, and itself has no interval and no
    null: the rule holds them. A recency window sets it off too.

    Interval and its rules: `specialization`. Proof: `experiments/planted`.
    """
    sums = tallied(data, *PAIRS, "never", "choosable", "chance_never")
    fixed, unused, twins = fixed_choice(sums), never_selected(sums), _twins(sums)
    keys = [name for name in ("step", "layer", "proxy") if name in fixed]
    rules = {
        "fixed_choice": (fixed, fixed["low"] > ALIKE),
        "twin": (twins, twins["low"] > ALIKE),
        "never_selected": (unused, unused["low"] > np.maximum(UNUSED, unused["null"])),
    }
    found = fixed[[*keys, "phase", "documents"]] if "phase" in fixed else fixed[[*keys, "documents"]]
    found = found.assign(metric="collapse", value=0.0, low=np.nan, high=np.nan, null=np.nan, because="")
    known = np.zeros(len(found), bool)
    for name, (frame, fired) in rules.items():
        fired, defined = (_aligned(frame.assign(x=flag), found, keys) for flag in (fired, frame["low"].notna()))
        known |= defined
        found["value"] = np.where(fired, 1.0, found["value"])
        found["because"] = np.where(
            fired, found["because"] + np.where(found["because"] == "", "", ", ") + name, found["because"]
        )
    found["reason"] = np.where(known, "", fixed["reason"])
    found.loc[~known, "value"] = np.nan
    return table(fixed, twins, unused, found)


def _aligned(frame: pd.DataFrame, like: pd.DataFrame, keys: list[str]) -> np.ndarray:
    return like[keys].merge(frame[[*keys, "x"]], how="left", on=keys)["x"].fillna(False).to_numpy(bool)


def _twins(sums: xr.Dataset) -> pd.DataFrame:
    """Each proxy's pair with the largest kappa, as a row of the proxy; column `other` names the twin."""
    frame = overlap(sums, pool=())
    frame = frame[frame["metric"] == "kappa"]
    if sums.sizes["proxy"] < 2:
        return frame.assign(metric="twin", value=np.nan, low=np.nan, high=np.nan)
    turned = frame.rename(columns={"proxy": "other", "other": "proxy"})
    both = table(frame, turned[frame.columns]).sort_values("value", ascending=False, na_position="last", kind="stable")
    keys = [name for name in ("step", "layer", "proxy") if name in both]
    return both.drop_duplicates(keys).sort_values(keys).assign(metric="twin").reset_index(drop=True)
