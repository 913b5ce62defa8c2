"""The judge's prompts, in the same place and under the same names as in the benchmark."""

import tau2.utils.llm_utils  # the real file imports what the miniature lacks


class NLAssertionsEvaluator:
    @classmethod
    def evaluate_nl_assertions(cls, trajectory, nl_assertions):
        trajectory_str = "\n".join(f"{message.role}: {message.content}" for message in trajectory)
        system_prompt = "Judge."
        user_prompt = f"""
        talk:
        {trajectory_str}
        outcomes:
        {nl_assertions}
        """
        return tau2.utils.llm_utils.generate(system_prompt, user_prompt)
