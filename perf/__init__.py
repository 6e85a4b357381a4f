# SPDX-License-Identifier: Apache-2.0
"""Measurements that anyone can repeat; each prints the command, the machine and the figures."""
