"""Suite `zoo`: models of timm, torchvision and transformers, without weights, against eager."""
