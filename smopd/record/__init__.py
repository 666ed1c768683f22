"""Records of a run: metrics, samples, token views, progress lines, trackers."""
