"""torchmetrics: metrics of several kinds, synchronised over the ranks at every step."""

import torch
import torch.distributed as dist
import torchmetrics
from client import BACKEND, STEPS, Steps


def main() -> None:
    dist.init_process_group(BACKEND)
    torch.manual_seed(dist.get_rank())
    metrics = torchmetrics.MetricCollection(
        {
            "accuracy": torchmetrics.classification.MulticlassAccuracy(5),
            "confusion": torchmetrics.classification.MulticlassConfusionMatrix(5),
            "auroc": torchmetrics.classification.MulticlassAUROC(5),  # gathers lists of uneven lengths
            "mean": torchmetrics.aggregation.CatMetric(),
        },
        compute_groups=False,
    )
    steps = Steps()
    for step in range(STEPS):
        count = 16 + 8 * dist.get_rank() + step
        scores, labels = torch.randn(count, 5).softmax(1), torch.randint(0, 5, (count,))
        for name, metric in metrics.items():
            metric.update(*((scores[:, 0],) if name == "mean" else (scores, labels)))
        found = metrics.compute()
        steps.done(sum(float(value.float().sum()) for value in found.values()))
        metrics.reset()
    steps.report(torch.tensor(steps.losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
