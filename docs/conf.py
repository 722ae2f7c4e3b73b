"""Sphinx settings of the manual: MyST pages, the furo theme."""

import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import pipefit

project = "pipefit"
author = "The pipefit authors"
copyright = "2026, The pipefit authors"
version = release = pipefit.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docs.drawings"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "amsmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
default_role = "code"

# The notebook is run by a test and read in Jupyter; the pages link to it.
exclude_patterns = ["_build", "**.ipynb", "**.ipynb_checkpoints"]

html_theme = "furo"
html_static_path = ["_static"]
html_title = "pipefit"


def setup(app):
    def options(app, what, name, obj, how, lines):
        """The fields of a group of options have their help in the field, not in the docstring."""
        if what == "class" and is_dataclass(obj):
            helps = {one.name: one.metadata.get("help") for one in fields(obj)}
            lines += ["", *(f":param {name}: {text}" for name, text in helps.items() if text), ""]

    app.connect("autodoc-process-docstring", options, priority=600)

    def first_line(app, what, name, obj, options, lines):
        """Napoleon takes what stands before a colon in a property's first line for a type; a comment has none."""
        if what == "property":
            lines[:0] = ["..", ""]

    app.connect("autodoc-process-docstring", first_line, priority=400)
