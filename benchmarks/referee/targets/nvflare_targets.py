"""NVFlare's filters of a client's outgoing parameters, with their defaults."""

from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy

from fedsim.audit.adapters.nvflare import filter_target

percentile = filter_target(lambda f: PercentilePrivacy())
svt = filter_target(lambda f: SVTPrivacy())
