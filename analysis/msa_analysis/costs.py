"""Costs of interventions with their intervals, from the sums of `changes.tally_changes`."""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from msa_analysis.changes import NO_BIN
from msa_analysis.choices import bin_label
from msa_analysis.statistics import MIN_DOCUMENTS, weighted_difference
from msa_analysis.wording import interval, number

QUANTITIES = {
    "loss": ("nats", "tokens", 1.0),
    "bits_per_byte": ("nats", "bytes", 1 / math.log(2)),
    "accuracy": ("hits", "tokens", 1.0),
}
"""Quantity: which sum, over which other one, times what. Nats a scored token; bits a byte; share of right answers."""
COLUMNS = (
    *("quantity", "distance_of", "bin", "distance", "value", "low", "high", "baseline"),
    *("documents", "share", "reason"),
)


def change_table(sums: xr.Dataset) -> pd.DataFrame:
    """Rows of changes with intervals, from `tally_changes`: what a token, byte or answer loses or gains on average.

    Columns intervention (its place), quantity ("loss", nats a scored token; "bits_per_byte", with text; "accuracy",
    where dependencies are known), distance_of, bin, distance (all three empty or missing for all tokens), value (the
    change: sum of changes over sum of tokens, bytes or answers, over all documents), low, high (95 %,
    delete-one-document jackknife with Student's t, over the documents that hold such tokens), baseline (the unchanged
    model's value on the same tokens), documents, share (of all scored tokens), reason (why there is no interval).

    Intervals speak of one trained model only.
    """
    kind, labels = sums.attrs["distance_of"], {"dependency": "no dependency", "lost block": "nothing lost"}
    names = [name for name in QUANTITIES if name != "accuracy" or kind == "dependency"]
    if not sums["bytes"].values.any():
        names.remove("bits_per_byte")
    arrays = {name: values.transpose("intervention", "document", "bin").values for name, values in sums.items()}
    rows = []
    for i in range(sums.sizes["intervention"]):
        whole = {name: values[i].sum(-1) for name, values in arrays.items()}
        parts = [({"distance_of": "", "bin": pd.NA, "distance": pd.NA}, whole)]
        for place, bin_ in enumerate(sums["bin"].values if kind else ()):
            label = labels[kind] if bin_ == NO_BIN else bin_label(int(bin_))
            part = {name: values[i, :, place] for name, values in arrays.items()}
            parts.append(({"distance_of": kind, "bin": int(bin_), "distance": label}, part))
        for quantity in names:
            for where, part in parts:
                if part["tokens"].any():
                    share = part["tokens"].sum() / whole["tokens"].sum()
                    row = {"intervention": i, "quantity": quantity, "share": share}
                    rows.append(row | where | _row(part, quantity))
    return pd.DataFrame(rows, columns=["intervention", *COLUMNS]).astype({"bin": "Int64"})


def _row(part: Mapping[str, np.ndarray], quantity: str) -> dict[str, Any]:
    total, over, factor = QUANTITIES[quantity]
    used = part[over] > 0
    weight, changed, own = (part[name][used] for name in (over, total, f"own_{total}"))
    count = int(used.sum())
    nothing = {"value": np.nan, "low": np.nan, "high": np.nan, "baseline": np.nan, "documents": count}
    if not count:
        return nothing | {"reason": f"no {over} here"}
    mean = factor * changed / weight
    value, low, high = weighted_difference(mean, np.zeros(count), weight)
    found = {"value": value, "low": low, "high": high, "baseline": factor * own.sum() / weight.sum()}
    reason = ""
    if count < MIN_DOCUMENTS:
        reason = f"{count} documents: an interval needs {MIN_DOCUMENTS}"
    elif not np.isfinite(value):
        reason = f"the {quantity} of some tokens is not finite"
    elif not changed.any():
        # Equal documents would give an interval of no width, as if nothing could ever change.
        found |= {"low": np.nan, "high": np.nan}
        reason = "no document changed: no interval"
    return nothing | found | {"reason": reason}


def cost_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The changes of all tokens and proxies as a reader sees them: a row a rule, a column a quantity.

    Takes `intervene.intervene`. All layers at once; a row a rule and layer where there are single layers only.
    """
    whole = frame[frame["proxy"].isna() & frame["bin"].isna()]
    at_once = whole[whole["layer"].isna()]  # pyright: ignore[reportAttributeAccessIssue]
    part, rows = (at_once, ["rule"]) if len(at_once) else (whole, ["rule", "layer"])
    shown = part.assign(change=[_shown(row) for row in part.itertuples()])  # pyright: ignore[reportAttributeAccessIssue]
    table = shown.pivot(index=rows, columns="quantity", values="change")
    order = shown.drop_duplicates(rows)[rows]
    return table.loc[order["rule"] if len(rows) == 1 else pd.MultiIndex.from_frame(order)]


def _shown(row: Any) -> str:
    if not math.isfinite(row.value):
        return row.reason
    between = interval(row.low, row.high, 4, sign=True)
    return f"{number(row.value, 4, sign=True)} ({between or row.reason})"
