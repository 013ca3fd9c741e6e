"""`qat cache`."""

from cyclopts import App

cache_app = App(help="Build, inspect, verify a teacher cache.")
