"""How Sphinx builds the site: `make docs`."""

from graphshard import __version__

project = "graphshard"
author = "the graphshard authors"
project_copyright = "2026, the graphshard authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["tools"]
html_theme = "furo"
html_title = f"graphshard {version}"
html_show_sphinx = False
html_copy_source = False

myst_heading_anchors = 4  # the anchors that headings have on code forges, too
# "An `Attributes:` section is one of the class's own text; a single backtick is code, as in Markdown."
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
