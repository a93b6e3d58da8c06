"""Whole denoises with the tiny transformer against the official ones, from conditioning items to final latents."""

import pytest
import torch
from comfyui_ltx25.ltx25.dit import Leg
from comfyui_ltx25.ltx25.guidance import combine
from comfyui_ltx25.tests.support import golden_dit as golden
from comfyui_ltx25.tests.support.denoise_cases import drafts_of_case, draws_of, job_of_case, run_job, start_of_case

CASES = golden.names("denoise/")


LEGS = {"cond": Leg.COND, "uncond": Leg.UNCOND, "ptb": Leg.STG, "mod": Leg.ISOLATED}


class Listening:
    """The tiny transformer, keeping the tokens and velocities of every call."""

    def __init__(self, dit):
        self.dit, self.calls = dit, []
        self.prepare, self.schedule_tables = dit.prepare, dit.schedule_tables

    def __call__(self, video, audio, *rest):
        velocities = self.dit(video, audio, *rest)
        self.calls.append({"video": video, "audio": audio, "velocities": velocities})
        return velocities


@pytest.mark.parametrize("name", CASES)
def test_drafts(name):
    case, want = golden.inputs(name), golden.outputs(name)
    drafts = drafts_of_case(case)
    start = start_of_case(case, drafts)
    for stream, draft in drafts.items():
        facts = draft.stream()
        golden.check(name, f"{stream}_start_tokens", start[stream])
        golden.check(name, f"{stream}_clean_tokens", draft.clean)
        golden.check(name, f"{stream}_denoise_mask", facts.mask[None, :, None])
        assert torch.equal(facts.positions[None], want[f"{stream}_positions"])
        if stream == "video":
            assert torch.equal(facts.marked[None, :, None].float(), want["video_keyframes_mask"])
        assert (draft.attention is not None) == (f"{stream}_attention_mask" in want)
        if draft.attention is not None:
            assert torch.equal(draft.attention[None], want[f"{stream}_attention_mask"])


@pytest.mark.parametrize("batched", [False, True], ids=["sequential", "batched"])
@pytest.mark.parametrize("name", CASES)
def test_denoise(name, batched):
    case, want = golden.inputs(name), golden.outputs(name)
    drafts = drafts_of_case(case)
    job = job_of_case(case, drafts, batched)
    dit, draw = Listening(golden.tiny_dit()), draws_of(case)
    outcome = run_job(dit, job, start_of_case(case, drafts), draw)

    assert [call.sigma for call in job.calls] == pytest.approx(want["sigma_at_call"], rel=1e-6)
    assert len(dit.calls) == sum(plan is not None for plan in job.plans)
    assert not draw.left  # as much noise as the official loop
    checked = {"sigma_at_call"}
    for stream, draft in drafts.items():
        tokens = outcome.tokens[stream]
        golden.check(name, f"{stream}_latent", draft.grid(tokens))
        checked.add(f"{stream}_latent")
        if "generated_keyframes" in want and stream == "video":
            golden.check(name, "generated_keyframes", draft.keyframes(tokens))
            checked.add("generated_keyframes")
        mask = draft.stream().mask[:, None]
        for call, (index, plan) in zip(dit.calls, ((i, plan) for i, plan in enumerate(job.plans) if plan is not None), strict=True):
            t = mask * job.calls[index].sigma
            run = {leg: getattr(velocity, stream) for leg, velocity in call["velocities"].items()}
            if stream in job.frozen:  # nobody reads its velocities: t is 0
                assert not t.any()
                run = {leg: torch.zeros_like(call[stream]) for leg in run}
            legs = {leg: call[stream] - t * velocity for leg, velocity in run.items() if velocity is not None}
            if run.keys() - legs.keys():  # officially run, and then weighted by 0 or, where the step is skipped, not used
                used = job.guided[index][stream].needs_isolated and getattr(plan, stream)
                assert run.keys() - legs.keys() == {Leg.ISOLATED} and not used
                checked |= {f"{stream}_{name}_at_call_{index}" for name, leg in LEGS.items() if leg is Leg.ISOLATED}
            values = {f"{stream}_{name}_at_call_{index}": legs[leg] for name, leg in LEGS.items() if leg in legs}
            values[f"{stream}_tokens_at_call_{index}"] = call[stream]
            values[f"{stream}_x0_at_call_{index}"] = combine(job.guided[index][stream], legs)
            for output, got in values.items():
                if output in want:
                    golden.check(name, output, got)
                    checked.add(output)
    assert set(want) - checked <= DRAFT  # the rest is test_drafts'


DRAFT = {f"{stream}_{part}" for stream in ("video", "audio") for part in ("start_tokens", "clean_tokens", "denoise_mask", "positions", "keyframes_mask", "attention_mask")}
