"""The typed configuration: one file per `conf/` group, composition, and the checks before anything starts."""
