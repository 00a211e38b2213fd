"""What the world does and costs: profile, cluster, stage graph, decode time, plan, replay, scores."""
