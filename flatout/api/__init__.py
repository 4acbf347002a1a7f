"""What `import flatout` offers: training, planning and finished runs from Python."""
