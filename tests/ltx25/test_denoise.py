"""Whole denoises with the tiny transformer against the official ones, from conditioning items to final latents."""

import pytest
import torch
from comfyui_ltx25.tests.support import golden_dit as golden
from comfyui_ltx25.tests.support.denoise_cases import draws_of, drafts_of_case, job_of_case, run_job, start_of_case

CASES = golden.names("denoise/")


class Listening:
    """The tiny transformer, keeping the tokens of every call."""

    def __init__(self, dit):
        self.dit, self.calls = dit, []
        self.prepare, self.schedule_tables = dit.prepare, dit.schedule_tables

    def __call__(self, video, audio, *rest):
        self.calls.append({"video": video, "audio": audio})
        return self.dit(video, audio, *rest)


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
        for index, call in enumerate(dit.calls[1:], 1):
            if f"{stream}_tokens_at_call_{index}" in want:
                golden.check(name, f"{stream}_tokens_at_call_{index}", call[stream])
    for output in want:
        known = output in checked or "_at_call_" in output or output.rsplit("_", 1)[0] in _DRAFT or output in _DRAFT
        assert known, output


_DRAFT = {f"{s}_{part}" for s in ("video", "audio") for part in ("start_tokens", "clean_tokens", "denoise_mask", "positions", "keyframes_mask", "attention_mask")}
