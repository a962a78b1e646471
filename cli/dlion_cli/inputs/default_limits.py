"""What of a manifest a site refuses unless its values, or the user's rights, allow it.

Called by `dlion validate`, which knows no site: it takes the chart's defaults. `dlion render` takes
a site's values.
"""

from dlion_api.spec import Job
from dlion_cli.inputs.chart_values import DEFAULTS, settings_of
from dlion_operator.children.worker_jobs import refused_by_site, worker_job

MAX_SHOWN = 3


def refused_by_default(job: Job) -> str:
    """Return a note on what the sites of that job refuse by default. Empty: nothing."""
    found: set[str] = set()
    for site in job.spec.sites:
        settings = settings_of(DEFAULTS, site.name, source="the chart's values")
        for group in site.groups:
            try:
                made = worker_job(job, group, settings, {"uid": ""})
                refused = refused_by_site(job, group, made, settings, by_rights=False)
            except (AttributeError, TypeError, ValueError, KeyError) as error:
                return f"podTemplate is not a valid pod template, for group {group.name}: {error}"
            found |= {f"{each.path}: {each.what}" for each in refused}
    if not found:
        return ""
    shown = sorted(found)
    more = f" and {len(shown) - MAX_SHOWN} more" if len(shown) > MAX_SHOWN else ""
    return (
        f"its sites refuse by default {'; '.join(shown[:MAX_SHOWN])}{more}"
        " (chart value tenancy.podTemplate; `dlion render --values` knows a site's)"
    )
