"""Steps of TRL's trainer and of ours, over every loss, level, KL, accumulation and number of iterations.

384 in all, of which each process does every fifth case: an odd number leaves none of these out.
"""

import pytest
from trl_cases import GROUP, Case, Ours, Stock, all_cases, difference, rows_at_once, run

EVERY = 5


@pytest.mark.parametrize("case", all_cases()[::EVERY], ids=str)
def test_a_step_is_trls_however_it_is_split(case: Case):
    """Parameters and metrics after four steps in float64, over the same completions, to 1e-10."""
    stock = run(Stock, case)
    for rows in (GROUP, 3 * GROUP, GROUP // 2):
        assert max(difference(stock, run(Ours, case, prepare=rows_at_once(rows)))) <= 1e-10, rows
