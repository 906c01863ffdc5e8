"""Where rows come from: files, directories, hubs, Python objects."""
