"""What every layer uses: checks of arguments and memory, private symbols of torch, names."""
