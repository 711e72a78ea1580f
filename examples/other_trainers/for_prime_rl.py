"""A recipe in prime-rl: call `use_recipe` before the orchestrator starts."""

# pyright: reportMissingImports=false

from loops import Groups


def use_recipe(recipe):
    from prime_rl.orchestrator import curriculum

    class RecipeSampler(curriculum.TaskSampler):
        def __init__(self, tasks):
            self.tasks = list(tasks)
            self.number = {task.key: number for number, task in enumerate(self.tasks)}
            self.groups = Groups(recipe, len(self.tasks))

        def __next__(self):
            return self.tasks[self.groups.next()[0]]

        def observe(self, group):
            traces = [trace for episode in group for trace in episode.traces if trace.agent.trainable]
            rewards = [None if trace.has_error else trace.reward for trace in traces]
            self.is_admitted = self.groups.end(self.number[group[0].task.key], rewards)

        def state_dict(self):
            return self.groups.state_dict()

        def load_state_dict(self, state_dict):
            self.groups.load_state_dict(state_dict)

    class RecipeGate(curriculum.AdmissionGate):
        def __init__(self, sampler):
            self.sampler = sampler

        def admit(self, group):  # prime-rl asks right after `observe`
            return self.sampler.is_admitted

    def __init__(self, config, tasks):
        self.sampler = RecipeSampler(tasks)
        self.gates = {"recipe": RecipeGate(self.sampler)}

    curriculum.Curriculum.__init__ = __init__
