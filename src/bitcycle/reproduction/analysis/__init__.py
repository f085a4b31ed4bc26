"""Results of finished runs: collection, statistics, and verdicts on the claims of the papers."""
