"""What is asked, what answers and what scores: data, environments, tools, rewards, and the processes that run them."""
