"""What is typed: parsing, help, exit codes."""
