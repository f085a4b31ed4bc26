"""Results of finished runs: their collection, and verdicts on the claims of the papers. The way from a claim to its verdict:

    claims.py         what is claimed: arms a and b, metric, predicate          results/published/claims/PAPER.yaml
    cells.py          the cells of its items, and their runs (`collect.py`)     results/summary/runs.csv
    facts.py          which cells are arm a and arm b, by facts about them (`labels.py`)
    frozen.py         which runs are due, if it is in a frozen family           results/published/families/NAME.yaml
    preconditions.py  which of them count, and why they may not decide it
    predicates.py     its test: estimate, interval and p-values, of contrasts (`contrast.py`) of metrics (`metrics.py`)
                      or of statistics of one seed (`claim_functions.py`, `gain.py`), by the formulas of `statistics.py`
    verdict.py        `judge` calls all of these, and corrects p-values         results/summary/claims.csv (`history.py`)

In claims.csv, `rule` says which test decides a claim, `scope` and `trainings` on which runs, and `reason` why it has no test or
what to know of it.
"""
