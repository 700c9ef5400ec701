"""`--check`: whether each row of a test met the objective."""

from __future__ import annotations

from loadtest import figures


def verdicts(total: figures.Figures, least_share: float) -> dict[str, tuple[bool, str]]:
    """Row → whether enough of its requests were good, and the figures in words."""
    result = {}
    for row in total.rows:
        requests = total.count(figures.REQUESTS, [row])
        share = total.good_share([row]) or 0.0
        words = [f"{100 * share:.1f} % of {requests} requests good, {total.count(figures.FAILED, [row])} failed"]
        for measure in (figures.TTFT, figures.GAP, figures.WHOLE, figures.CANCEL):
            quantiles = total.of(measure, [row]).quantiles((0.5, 0.99))
            if quantiles:
                words.append(f"{measure} p50 {quantiles['p50']:.1f} ms, p99 {quantiles['p99']:.1f} ms")
        result[row] = (requests > 0 and share >= least_share, "; ".join(words))
    return result
