"""No policy that never reads the record of a request earns much in the embedded domains."""

import pytest

from pipeline.evaluation.baselines import baselines
from tests.support.helpers import DOMAINS, embedded, module_of
from tests.support.unread import unread, unread_by_family

# The mean over the families of the largest share of a branch: (.28 + .60 + .30) / 3 for airline.
COMMONEST = {"airline": 0.393, "retail": 0.370, "telecom": 0.383}


@pytest.mark.parametrize("domain", DOMAINS)
def test_policies_that_never_look_earn_next_to_nothing_in_the_embedded_domains(domain):
    tasks = module_of(domain).generate_tasks(0, 150, "test", "medium")
    domains = embedded(domain)
    found = baselines(domains, {domain: tasks})[domain]
    assert found.pop("nothing") == 0.0
    name = "commonest case"
    assert found == (
        {name: pytest.approx(COMMONEST[domain], abs=0.005)} if domain in COMMONEST else {}
    )
    alike, by_family = (best(domains[domain], tasks) for best in (unread, unread_by_family))
    assert alike <= by_family < 0.5
