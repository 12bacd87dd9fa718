"""What the dashboards of verl and TRL call the numbers that mean the same; docs/metrics.md has this table.

Left out are names whose number is another: verl's actor/ppo_kl is k1, TRL's reward_std the mean of the groups'.
"""

PEERS: dict[str, tuple[str, str]] = {
    "reward/mean": ("critic/score/mean", "reward"),
    "reward/min": ("critic/score/min", ""),
    "reward/max": ("critic/score/max", ""),
    "reward/equal_groups_frac": ("", "frac_reward_zero_std"),
    "reward/{name}": ("", "rewards/NAME/mean"),
    "length/mean": ("response_length/mean", "completions/mean_length"),
    "length/min": ("response_length/min", "completions/min_length"),
    "length/max": ("response_length/max", "completions/max_length"),
    "length/truncated_frac": ("response_length/clip_ratio", "completions/clipped_ratio"),
    "policy/entropy": ("actor/entropy", "entropy"),
    "policy/loss": ("actor/pg_loss", "loss"),
    "policy/clip_frac": ("actor/pg_clipfrac", "clip_ratio/region_mean"),
    "policy/kl_loss": ("actor/kl_loss", "kl"),
    "policy/grad_norm": ("actor/grad_norm", "grad_norm"),
    "policy/lr": ("actor/lr", "learning_rate"),
    "critic/loss": ("critic/vf_loss", ""),
    "critic/clip_frac": ("critic/vf_clipfrac", ""),
    "critic/explained_variance": ("critic/vf_explained_var", ""),
    "critic/value_mean": ("critic/values/mean", ""),
    "critic/return_mean": ("critic/returns/mean", ""),
    "critic/grad_norm": ("critic/grad_norm", ""),
    "critic/lr": ("critic/lr", ""),
    "advantage/mean": ("critic/advantages/mean", ""),
    "time/rollout": ("timing_s/gen", ""),
    "perf/time_per_step": ("perf/time_per_step", "step_time"),
    "perf/cpu_memory_used_gb": ("perf/cpu_memory_used_gb", ""),
}
"""Our name -> (verl's, TRL's), empty where it has none"""
