# Install rules; filled with the tools.
