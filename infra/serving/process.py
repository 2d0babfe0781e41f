"""The fleet's process: `python -m infra.serving.process PORT`. Started by `infra.services.local.serve`."""

import asyncio
import logging
import sys

from infra.serving.fleet import main

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    asyncio.run(main(int(sys.argv[1])))
