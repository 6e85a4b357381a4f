# SPDX-License-Identifier: Apache-2.0
"""Build what the model repository serves: `python -m build_engines --help`."""
