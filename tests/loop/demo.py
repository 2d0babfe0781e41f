"""What `lockstep demo` would be: python demo.py FOLDER [--local] [--new]"""

import sys

from demo_config import DemoConfig

from flows.cli.exits import Stop
from flows.cli.run import Request, run_flow

try:
    run_flow(
        Request("demo", local="--local" in sys.argv, module="demo_flows"),
        DemoConfig(folder=sys.argv[1]),
        new="--new" in sys.argv,
        as_json=True,
    )
except Stop as stop:
    print(stop, file=sys.stderr)
    sys.exit(stop.code)
