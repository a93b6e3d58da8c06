"""ComfyUI's own LTX-2.5 model on the tiny files against ours: same latent, same text, same noise levels, one clip.

With both streams the two are not the same model: ComfyUI 0.33 lets the sound read the video after the video has read the
sound, the official code (and ours) before. Video alone has no such reading, so there they agree to float32 noise.
"""

import pytest
from comfyui_ltx25.ltx25.tiny import TinyFiles

LEVELS = "1.0, 0.9, 0.6, 0.3, 0.0"


def both(api, find, tiny, latent, frame_rate):
    """Our sampler and the native graph on one latent and one conditioning, without guidance, in one prompt."""
    prompt = api("text_to_video_distilled_tiny")
    ours, text = find(prompt, "LTX25Sampler"), find(prompt, "EncodeGemmaText")
    prompt["latent"] = {"class_type": "ProbeLatent", "inputs": {"fill": "zeros", **latent}}
    prompt["levels"] = {"class_type": "ManualSigmas", "inputs": {"sigmas": LEVELS}}
    prompt[ours]["inputs"].update(latent=["latent", 0], seed=11, sampler="euler", sigmas=["levels", 0], frame_rate=frame_rate)
    add = {
        "model": ("UNETLoader", {"unet_name": TinyFiles.below(tiny).distilled.name, "weight_dtype": "default"}),
        "rate": ("LTXVConditioning", {"positive": [text, 0], "negative": [text, 0], "frame_rate": frame_rate}),
        "guider": ("CFGGuider", {"model": ["model", 0], "positive": ["rate", 0], "negative": ["rate", 1], "cfg": 1.0}),
        "noise": ("RandomNoise", {"noise_seed": 11}),
        "select": ("KSamplerSelect", {"sampler_name": "euler"}),
        "native": (
            "SamplerCustomAdvanced",
            {"noise": ["noise", 0], "guider": ["guider", 0], "sampler": ["select", 0], "sigmas": ["levels", 0], "latent_image": ["latent", 0]},
        ),
        "apart": ("LatentSubtract", {"samples1": [ours, 0], "samples2": ["native", 0]}),
    }
    prompt.update({key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in add.items()})
    return prompt, ours


@pytest.mark.parametrize("frame_rate", [24.0, 50.0])
def test_native_nodes_sample_video_with_our_conditioning_and_make_our_clip(host, api, find, inspect, tiny, frame_rate):
    prompt, ours = both(api, find, tiny, {"video": "[1, 128, 3, 2, 3]"}, frame_rate)
    own, apart = inspect(prompt, ours), inspect(prompt, "apart")
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    difference, clip = apart(run)["samples"], own(run)["samples"]
    assert max(abs(difference["min"]), abs(difference["max"])) < 1e-5 * max(abs(clip["min"]), abs(clip["max"]))


def test_native_nodes_sample_video_and_sound_with_our_conditioning(host, api, find, inspect, tiny):
    prompt, _ = both(api, find, tiny, {"video": "[1, 128, 3, 2, 3]", "audio": "[1, 8, 18, 16]"}, 24.0)
    del prompt["apart"]
    native = inspect(prompt, "native")
    run = host.run(prompt, targets=[key for key in prompt if key.startswith("inspect")])
    assert all(part["finite"] and part["std"] > 0.1 for part in native(run)["samples"]["nested"])
