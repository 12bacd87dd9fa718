"""The typed configuration: one file per `conf/` group, composition, and the checks that end a bad run before it starts."""
