"""Sources of records: files, directories, datasets on the hub, Python objects."""
