"""What a run leaves behind while it trains: metrics, samples, token views, progress lines, trackers."""
