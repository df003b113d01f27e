"""Pretrain the bundled model; its model card in grpo/assets/rook-tiny says with which command."""

import sys

import tyro
from benchmarks.pretrain import PretrainConfig, pretrain
from loguru import logger

if __name__ == "__main__":
    logger.remove()
    logger.add(sys.stderr, format="{time:HH:mm:ss} {message}")
    pretrain(tyro.cli(PretrainConfig))
