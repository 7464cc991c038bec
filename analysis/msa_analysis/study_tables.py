"""What a study says over its seeds, from `study_results.load` alone, without any run.

    results = load("experiments/proxies/results")
    differences(results, [("p2", "dense")], margin=0.01)

The seed is the unit: every interval here is Student's t over seeds, of differences where arms are compared, paired by
the stem that they share.
"""

# pandas' own types make every df[...] and every row a union of unrelated classes; pyright cannot follow them here.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from scipy import optimize, stats

from msa_analysis.choices import bin_label, log2_bin
from msa_analysis.quality import METRICS, metric_of, refuse_unlike
from msa_analysis.statistics import discoveries, weighted_difference
from msa_analysis.study_results import Results, over_seeds
from msa_lab.budget import TOLERANCE

COUNTS = (3, 5, 8, 12, 20)
"""Numbers of seeds of a table of power."""


def quality(results: Results) -> pd.DataFrame:
    """A row an arm: arm, metric, value with low and high over seeds, seeds, sd, parameters, proxies, flops_total,
    wall_seconds, tokens_per_second (means over seeds). Lower is better."""
    runs = results.table("runs")
    if not len(runs):
        return pd.DataFrame()
    metric = metric_of(runs)
    cost = ["parameters", "proxies", "flops_total", "wall_seconds", "tokens_per_second"]
    means = runs.groupby("arm", sort=False)[cost].mean().reset_index()
    found = over_seeds(runs, ["arm"], value=metric).drop(columns="p")
    return found.assign(metric=metric).merge(means, on="arm")


def by_seed(results: Results, pairs: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """Each seed's difference of two arms, the first minus the second: arm, reference, seed, value, and row_error, its
    standard error over validation rows (rows that share a document make it too small).

    Raises:
        ValueError: Runs of a pair differ in corpus, validation rows, tokens or number of parameters.
    """
    runs, rows = results.table("runs"), results.table("rows")
    columns = ["arm", "reference", "seed", "value", "row_error"]
    if not len(runs):
        return pd.DataFrame(columns=columns)
    metric, found = metric_of(runs), []
    per_row, weight = METRICS[metric]
    scored = {key: part.set_index("id") for key, part in rows.groupby(["arm", "seed"])}
    for arm, base in pairs:
        mine, theirs = runs[runs["arm"] == arm], runs[runs["arm"] == base]
        both = mine.merge(theirs, on="seed", suffixes=("", "_base"))
        if arm == base or both.empty:
            continue
        refuse_unlike(both, arm, base)
        for row in both.to_dict("records"):
            seed, size, size_base = row["seed"], row["parameters"], row["parameters_base"]
            if abs(size - size_base) > 2 * TOLERANCE * size_base:  # each may miss the common number by one
                raise ValueError(
                    f"{arm} seed {seed}: has {size:,} parameters, and {base} {size_base:,}, as when a larger arm came "
                    "to the study later; run the seed's arms again"
                )
            other = scored[base, seed][[per_row]].add_suffix("_base")
            one = scored[arm, seed].join(other, how="inner")
            parts = (one[name].to_numpy(float) for name in (per_row, f"{per_row}_base", weight))
            _, low, high = weighted_difference(*parts)
            error = (high - low) / 2 / stats.t.ppf(0.975, max(len(one) - 1, 1))
            apart = {"value": row[metric] - row[f"{metric}_base"], "row_error": error}
            found.append({"arm": arm, "reference": base, "seed": seed} | apart)
    return pd.DataFrame(found, columns=columns)


def differences(results: Results, pairs: Iterable[tuple[str, str]], *, margin: float) -> pd.DataFrame:
    """Differences in quality over seeds: arm, reference, value, low, high, seeds, sd, p, q, verdict. Positive is worse.

    `q`: p corrected over all pairs (Benjamini and Hochberg). `verdict`, by the 95 % interval: "better" if all of it
    lies below 0, "as good" if below the margin, "worse" if above the margin, else "open"; empty without an interval.
    """
    found = over_seeds(by_seed(results, pairs), ["arm", "reference"])
    low, high = found["low"].to_numpy(float), found["high"].to_numpy(float)
    cases = [~np.isfinite(low), high < 0, high < margin, low > margin]
    return found.assign(q=discoveries(found["p"]), verdict=np.select(cases, ["", "better", "as good", "worse"], "open"))


def twins(results: Results, twice: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Arms that are one arm: by pair and seed whether weights and losses are the same bits, and the difference."""
    runs = results.table("runs")
    held = {(row.arm, row.seed): row for row in runs.itertuples()}
    metric, found = metric_of(runs) if len(runs) else "", []
    for first, second in twice:
        for seed in results.seeds:
            one, other = held.get((first, seed)), held.get((second, seed))
            if one is not None and other is not None:
                same = {name: getattr(one, name) == getattr(other, name) for name in ("weights", "losses")}
                apart = getattr(other, metric) - getattr(one, metric)
                found.append({"arm": first, "again": second, "seed": seed, "difference": apart, **same})
    return pd.DataFrame(found, columns=["arm", "again", "seed", "difference", "weights", "losses"])


def power(results: Results, pairs: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """What a study could see: by pair the spread of paired differences, and the least difference that so many seeds
    find with probability 0.8 at p < 0.05 (two-sided paired t test, noncentral t), column `seeds_N` of `COUNTS`.

    `sd`: over seeds; `sd_low`, `sd_high`: its own interval (95 %, chi squared, of normal differences), as few seeds
    know their spread badly. `row_error`: of one seed's difference over its validation rows, root mean square over
    seeds; part of `sd`.
    """
    rows = []
    for (arm, base), part in by_seed(results, pairs).groupby(["arm", "reference"], sort=False):
        sample = part["value"].to_numpy(float)
        freedom = len(sample) - 1
        sd, ends = np.nan, (np.nan, np.nan)
        if freedom > 0:
            sd = float(sample.std(ddof=1))
            ends = tuple(sd * np.sqrt(freedom / stats.chi2.ppf(p, freedom)) for p in (0.975, 0.025))
        row = {"arm": arm, "reference": base, "seeds": len(sample), "sd": sd, "sd_low": ends[0], "sd_high": ends[1]}
        row |= {"row_error": float(np.sqrt((part["row_error"] ** 2).mean()))}
        rows.append(row | {f"seeds_{count}": sd * detectable(count) for count in COUNTS})
    return pd.DataFrame(rows)


def detectable(seeds: int, *, chance: float = 0.8, level: float = 0.05) -> float:
    """The least mean of paired differences, in their standard deviations, that a two-sided t test of so many finds.

    `seeds`: at least 3; with two, the noncentral t has no number where it is wanted.
    """
    freedom, critical = seeds - 1, stats.t.ppf(1 - level / 2, seeds - 1)

    def found(effect: float) -> float:
        centre = effect * np.sqrt(seeds)
        return float(stats.nct.sf(critical, freedom, centre) + stats.nct.cdf(-critical, freedom, centre) - chance)

    enough = 0.25
    while found(enough) < 0:  # far beyond the answer the noncentral t has no number
        enough *= 2
    return float(optimize.brentq(found, 0.0, enough))


def costs(results: Results, by: Sequence[str] = (), *, quantity: str = "loss") -> pd.DataFrame:
    """What other selections cost, over seeds: arm, rule, value, low, high, seeds, sd, p, q.

    All layers at once, all tokens; `by`: ("layer",) one layer at a time, ("bin", "distance") all layers by distance.
    `q`: p corrected over the places of an arm and rule (Benjamini and Hochberg).
    """
    keys = ["arm", "rule", *by]
    frame = results.table("costs").reindex(columns=[*keys, "seed", "quantity", "layer", "bin", "value"])
    frame = frame.loc[:, ~frame.columns.duplicated()]
    single, binned = frame["layer"].notna(), frame["bin"].notna()
    frame = frame[(frame["quantity"] == quantity) & (single == ("layer" in by)) & (binned == ("bin" in by))]
    found = over_seeds(frame, keys)
    found["q"] = np.nan
    for _, part in found.groupby(["arm", "rule"]):
        found.loc[part.index, "q"] = discoveries(part["p"])
    return found


def worth(results: Results) -> pd.DataFrame:
    """What one shared selection costs in each arm, all layers at once: arm, value, low, high, seeds, sd, p, q, recency.

    `q`: p corrected over arms (Benjamini and Hochberg). `recency`: the mean cost of the most recent blocks.
    """
    found = costs(results)
    recency = found[found["rule"] == "recency"].set_index("arm")["value"]
    shared = found[(found["rule"] == "shared") & found["value"].notna()].drop(columns="rule")
    return shared.assign(q=discoveries(shared["p"]), recency=shared["arm"].map(recency))


def specialization(results: Results, metrics: Sequence[str], *, over: str = "end") -> pd.DataFrame:
    """Metrics of whole runs and of layers (layer is missing, or a number), over seeds, with the mean of their nulls.

    `over`: "end", the last record, or "training", every record (then with a column step).
    """
    keys = ["arm", "metric", "layer", *(["step"] if over == "training" else [])]
    frame = results.table(over).reindex(columns=[*keys, "seed", "value", "null"])
    frame = frame[frame["metric"].isin(metrics)]
    null = frame.groupby(keys, sort=False, dropna=False)["null"].mean().reset_index()
    return over_seeds(frame, keys).merge(null, on=keys, how="left")


def answers(results: Results) -> pd.DataFrame:
    """Accuracy over seeds by log2 bin of distance, and (bin is -1) of all questions: arm, bin, distance, value, ..."""
    frame = results.table("answers").reindex(columns=["arm", "seed", "distance", "accuracy", "questions"])
    bins = log2_bin(frame["distance"].to_numpy(float)) if len(frame) else []
    frame = frame.assign(bin=bins, right=frame["accuracy"] * frame["questions"])
    both = pd.concat([frame, frame.assign(bin=-1)])
    total = both.groupby(["arm", "seed", "bin"], sort=False)[["right", "questions"]].sum().reset_index()
    total["accuracy"] = total["right"] / total["questions"]
    found = over_seeds(total, ["arm", "bin"], value="accuracy").sort_values(["bin"], kind="stable")
    return found.assign(distance=["all" if bin_ < 0 else bin_label(int(bin_)) for bin_ in found["bin"]])
