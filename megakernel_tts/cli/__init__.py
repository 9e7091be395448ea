"""The command line: options, progress, results and errors of the commands."""
