"""Translations of node names, as the frontend asks for them."""


def test_translations_reach_the_frontend(host):
    assert host.get("/i18n")["zh"]["nodeDefs"]["LTX25Sampler"]["display_name"] == "LTX-2.5 采样器"
    assert host.get("/i18n")["zh"]["nodeDefs"]["LTX25ImageCondition"]["inputs"]["frame"]["tooltip"].endswith("-1 为最后一帧。")
