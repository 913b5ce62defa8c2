from functools import partial

from tau2.domains.shop import environment_of

get_environment = partial(environment_of, "airline")
