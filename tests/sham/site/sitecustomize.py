"""Python runs this as a process starts whose PYTHONPATH has this folder: its torch will have simulated GPUs."""

import importlib.util
import os
import sys
from pathlib import Path

if "PIPEFIT_SHAM" in os.environ:
    spec = importlib.util.spec_from_file_location("sham_driver", Path(__file__).parents[1] / "driver.py")
    driver = importlib.util.module_from_spec(spec)
    sys.modules["sham_driver"] = driver
    spec.loader.exec_module(driver)
    driver.install()
