"""The subcommands of `fusion`: each adds its arguments to the parser and returns an exit status."""
