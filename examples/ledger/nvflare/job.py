"""Three sites, ten rounds by NVFlare's simulator: `python job.py DIRECTORY MAX_EPSILON`."""

import sys
from pathlib import Path

from charged_filter import ChargedFilter
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.api import FedJob, FilterType
from nvflare.job_config.script_runner import FrameworkType, ScriptRunner

directory, max_epsilon = Path(sys.argv[1]).resolve(), float(sys.argv[2])
directory.mkdir(parents=True, exist_ok=True)
job = FedJob(name="charged")
controller = FedAvg(num_clients=3, num_rounds=10, persistor_id="", model={"w": [0.0] * 4})
job.to_server(controller)
for site in ("site-1", "site-2", "site-3"):
    client = str(Path(__file__).with_name("client.py"))
    job.to(ScriptRunner(client, framework=FrameworkType.NUMPY), site)
    charged = ChargedFilter(str(directory), 1.0, 4.0, max_epsilon)
    job.to(charged, site, filter_type=FilterType.TASK_RESULT, tasks=["train"])
job.simulator_run(str(directory / "nvflare"))
