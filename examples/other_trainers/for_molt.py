"""A recipe in Molt: put the class in the place of `molt.trainer.rl_trainer.SamplesGenerator`, in the process that makes it.

`prompts_dataloader` is read once, and the recipe then draws from its rows.
"""

# pyright: reportMissingImports=false

from loops import Groups


def recipe_samples(recipe):
    from molt.trainer.rollout.samples_generator import SamplesGenerator

    class RecipeSamples(SamplesGenerator):
        def __init__(self, strategy, prompts_dataloader, eval_dataloader, tokenizer, agent_runners):
            batches = [batch[1:] for batch in prompts_dataloader]
            self.rows = [row for batch in batches for row in zip(*batch, strict=True)]
            self.groups, self.drawn, self.prompt_of = Groups(recipe, len(self.rows)), [], {}
            super().__init__(strategy, self, eval_dataloader, tokenizer, agent_runners)

        def __iter__(self):
            while True:
                prompt, _ = self.groups.next()
                self.drawn.append(prompt)
                yield (None, *([value] for value in self.rows[prompt]))

        def _dispatch_to_agent_runners(self, prompts, labels, **how):
            references = super()._dispatch_to_agent_runners(prompts, labels, **how)
            self.prompt_of |= zip(references, self.drawn, strict=False)  # nothing was drawn for an evaluation
            self.drawn = []
            return references

        def _filter_group(self, finished_rollout, dynamic_filtering, drop_counts, score_stats=None, **how):
            kept = super()._filter_group(finished_rollout, False, drop_counts, score_stats=score_stats, **how)
            if finished_rollout not in self.prompt_of:  # an evaluation's
                return kept
            rewards = {
                sample.rollout_ids[0]: sample.scores[0].item() for sample in kept
            }  # a rollout may be several samples
            is_admitted = self.groups.end(self.prompt_of.pop(finished_rollout), list(rewards.values()))
            return kept if is_admitted else []

    return RecipeSamples
