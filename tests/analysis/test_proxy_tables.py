"""The table of single proxies: which one differs, with p-values corrected over layers and proxies."""

from __future__ import annotations

import numpy as np
import pandas as pd
import planted
import pytest
from msa_analysis import specialization
from msa_analysis.statistics import discoveries
from msa_analysis.tally import tally

RUN = specialization.RUN


def one(frame: pd.DataFrame, metric: str, **where: float) -> pd.Series:
    rows = frame[frame["metric"] == metric]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    assert len(rows) == 1
    return rows.iloc[0]


def test_information_of_proxies_averages_to_the_mutual_information_and_names_the_odd_one() -> None:
    log = planted.log([planted.uniform, planted.uniform, planted.leaning(6)], documents=12, layers=2)
    frame = specialization.proxy_information(log, permutations=199)
    assert len(frame) == 6
    whole = specialization.mutual_information(log, permutations=199)
    for layer in (0, 1):
        part = frame[frame["layer"] == layer].set_index("proxy")
        strength = one(whole, "mutual_information", layer=layer, step=100)
        assert part["plug_in"].mean() == pytest.approx(strength["plug_in"])
        assert part["value"].mean() == pytest.approx(strength["value"])
        assert part["value"].idxmax() == 2
        assert part.loc[2, "low"] > 0
    assert frame["q_value"].to_numpy() == pytest.approx(discoveries(frame["p_value"]))


def test_proxies_that_choose_alike_are_no_discovery() -> None:
    log = planted.log([planted.leaning(2)] * 3, documents=12, layers=4, steps=(0,))
    frame = specialization.proxies(log)
    alike = frame[frame["metric"] == "proxy_information"]
    assert (alike["low"] <= 1e-12).sum() >= 11
    assert (alike["q_value"] > 0.05).sum() >= 11
    assert (frame[frame["metric"] == "recency"]["q_value"] < 0.01).all()  # all of them lean to the near


def test_variance_between_proxies_is_tested_by_the_same_permutations() -> None:
    apart = specialization.mutual_information(planted.log([planted.leaning(2), planted.uniform]), permutations=199)
    assert one(apart, "eta_squared", step=100)["p_value"] <= 0.02
    alike = specialization.mutual_information(planted.log([planted.uniform] * 2, seed=3), permutations=199)
    row = one(alike, "eta_squared", step=100)
    assert row["p_value"] > 0.02
    assert row["null_mean"] == pytest.approx(row["plug_in"], abs=0.01)
    few = planted.log([planted.leaning(2), planted.uniform], documents=5)
    assert np.isnan(one(specialization.mutual_information(few), "eta_squared", step=100)["p_value"])


def test_tests_are_corrected_within_a_metric_over_layers_and_proxies() -> None:
    log = planted.log([planted.leaning(1), planted.uniform], layers=3, steps=(0,), documents=8)
    sums = tally(log)
    frame = specialization.tested(pd.concat([specialization.recency(sums), specialization.block_recall(sums)]))
    for metric in ("recency", "excess_recency", "recall_excess"):
        part = frame[frame["metric"] == metric]
        assert len(part) == 6
        assert part["q_value"].to_numpy() == pytest.approx(discoveries(part["p_value"]))
    leaning = frame[(frame["metric"] == "recency") & (frame["proxy"] == 0)]
    assert (leaning["p_value"] < 0.01).all()
    # The null of recall itself is a number that the data make: its test is that of the excess.
    assert frame[frame["metric"] == "block_recall"]["p_value"].isna().all()


def test_one_table_of_a_run_has_a_row_a_metric_layer_and_proxy() -> None:
    frame = specialization.proxies(planted.log([planted.uniform, planted.newest], layers=2))
    assert (frame.groupby("metric").size() == 4).all()
    assert {"recency", "coverage_over_window", "proxy_information", "twin", "collapse", "stability"} <= set(
        frame["metric"]
    )
    undefined = frame[frame["value"].isna()]
    assert (undefined["reason"] != "").all()
