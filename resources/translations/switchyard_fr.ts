<?xml version="1.0" encoding="utf-8"?>
<!DOCTYPE TS>
<TS version="2.1" language="fr" sourcelanguage="en">
    <context>
        <name>AboutCard</name>
        <message>
            <source>About</source>
            <translation>À propos</translation>
        </message>
        <message>
            <source>Licences</source>
            <translation>Licences</translation>
        </message>
        <message>
            <source>Open logs</source>
            <translation>Ouvrir les journaux</translation>
        </message>
        <message>
            <source>Switchyard {0}</source>
            <translation>Switchyard {0}</translation>
        </message>
        <message>
            <source>Python {0}, Qt {1}</source>
            <translation>Python {0}, Qt {1}</translation>
        </message>
        <message>
            <source>Logs</source>
            <translation>Journaux</translation>
        </message>
        <message>
            <source>Contain no prompts and no answers: {0}</source>
            <translation>Ne contiennent ni prompts ni réponses : {0}</translation>
        </message>
        <message>
            <source>Save report…</source>
            <translation>Enregistrer un rapport…</translation>
        </message>
        <message>
            <source>Report</source>
            <translation>Rapport</translation>
        </message>
        <message>
            <source>One file to attach to a bug report: versions, hardware, findings and the end of the logs. </source>
            <translation>Un fichier à joindre au signalement d’un défaut : versions, matériel, éléments détectés, fin des journaux. </translation>
        </message>
        <message>
            <source>No prompts, no names; nothing is sent.</source>
            <translation>Ni prompts, ni noms ; rien n’est envoyé.</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>Examen de ce PC…</translation>
        </message>
        <message>
            <source>It is in {0}: read it before you pass it on.</source>
            <translation>Il se trouve dans {0} : lisez-le avant de le transmettre.</translation>
        </message>
    </context>
    <context>
        <name>AnswerCard</name>
        <message>
            <source>Answers</source>
            <translation>Réponses</translation>
        </message>
        <message>
            <source>More sampling…</source>
            <translation>Plus de réglages…</translation>
        </message>
        <message>
            <source>Max</source>
            <translation>Max.</translation>
        </message>
        <message>
            <source>tokens</source>
            <translation>tokens</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>Température</translation>
        </message>
        <message>
            <source>Max tokens per answer</source>
            <translation>Tokens max. par réponse</translation>
        </message>
        <message>
            <source>Answer must be</source>
            <translation>Forme de la réponse</translation>
        </message>
        <message>
            <source>Text</source>
            <translation>Texte</translation>
        </message>
        <message>
            <source>One of choices</source>
            <translation>Un choix parmi plusieurs</translation>
        </message>
        <message>
            <source>JSON with a schema</source>
            <translation>JSON selon un schéma</translation>
        </message>
        <message>
            <source>Choices</source>
            <translation>Choix</translation>
        </message>
        <message>
            <source>One choice per line, such as
positive
negative</source>
            <translation>Un choix par ligne, par exemple
positif
négatif</translation>
        </message>
        <message>
            <source>JSON schema</source>
            <translation>Schéma JSON</translation>
        </message>
        <message>
            <source>Enter at least two choices, one per line.</source>
            <translation>Saisissez au moins deux choix, un par ligne.</translation>
        </message>
        <message>
            <source>Enter the JSON schema that answers must follow.</source>
            <translation>Saisissez le schéma JSON que les réponses doivent respecter.</translation>
        </message>
        <message>
            <source>The schema is not a JSON object.</source>
            <translation>Le schéma n’est pas un objet JSON.</translation>
        </message>
        <message>
            <source>The schema is not JSON: {0}.</source>
            <translation>Le schéma n’est pas du JSON valide : {0}.</translation>
        </message>
        <message>
            <source>Default answer settings</source>
            <translation>Réglages de réponse par défaut</translation>
        </message>
    </context>
    <context>
        <name>AnswerMessage</name>
        <message>
            <source>Copy the answer</source>
            <translation>Copier la réponse</translation>
        </message>
        <message>
            <source>Answer again</source>
            <translation>Répondre à nouveau</translation>
        </message>
        <message>
            <source>Continue in a new chat</source>
            <translation>Poursuivre dans une nouvelle discussion</translation>
        </message>
        <message>
            <source>Edit the answer</source>
            <translation>Modifier la réponse</translation>
        </message>
        <message>
            <source>Delete the answer</source>
            <translation>Supprimer la réponse</translation>
        </message>
        <message>
            <source>Continue</source>
            <translation>Continuer</translation>
        </message>
        <message>
            <source>Restart engine</source>
            <translation>Redémarrer le moteur</translation>
        </message>
        <message>
            <source>Fold earlier turns</source>
            <translation>Résumer les échanges précédents</translation>
        </message>
        <message>
            <source>The model summarises them, and reads the summary instead.</source>
            <translation>Le modèle les résume, puis lit le résumé à leur place.</translation>
        </message>
        <message>
            <source>Leave out the oldest</source>
            <translation>Omettre les plus anciens</translation>
        </message>
        <message>
            <source>The engine is not running. Restart it to get your answer.</source>
            <translation>Le moteur n’est pas en marche. Redémarrez-le pour obtenir votre réponse.</translation>
        </message>
        <message>
            <source>folded, not sent</source>
            <translation>résumé, non envoyé</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>Copié</translation>
        </message>
    </context>
    <context>
        <name>AnswerView</name>
        <message>
            <source>Answer</source>
            <translation>Réponse</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>Copier</translation>
        </message>
        <message>
            <source>Copy link</source>
            <translation>Copier le lien</translation>
        </message>
        <message>
            <source>Select all</source>
            <translation>Tout sélectionner</translation>
        </message>
        <message>
            <source>Copy all as plain text</source>
            <translation>Tout copier en texte brut</translation>
        </message>
        <message>
            <source>Copy all as Markdown</source>
            <translation>Tout copier en Markdown</translation>
        </message>
    </context>
    <context>
        <name>ApiServer</name>
        <message>
            <source>Port {0} is in use by another program, or not allowed. Choose another one.</source>
            <translation>Le port {0} est utilisé par un autre programme ou n’est pas autorisé. Choisissez-en un autre.</translation>
        </message>
        <message>
            <source>The server stopped unexpectedly. Turn it off and on again.</source>
            <translation>Le serveur s’est arrêté de façon inattendue. Désactivez-le, puis réactivez-le.</translation>
        </message>
        <message>
            <source>The server could not be started. Reinstall Switchyard.</source>
            <translation>Le serveur n’a pas pu démarrer. Réinstallez Switchyard.</translation>
        </message>
    </context>
    <context>
        <name>Asking</name>
        <message>
            <source>Cancel</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>A batch job is running.</source>
            <translation>Une tâche par lots est en cours.</translation>
        </message>
        <message>
            <source>Loading a model pauses it. No answered row is lost: you can resume it later, with the same model and precision.</source>
            <translation>Charger un modèle la met en pause. Aucune ligne traitée n’est perdue : vous pourrez la reprendre plus tard, avec le même modèle et la même précision.</translation>
        </message>
        <message>
            <source>Pause the job</source>
            <translation>Mettre la tâche en pause</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>{0} tâche par lots est en cours.</numerusform>
                <numerusform>{0} tâches par lots sont en cours.</numerusform>
            </translation>
        </message>
        <message>
            <source>Loading a model pauses them. No answered row is lost: you can resume them later, with the same model and precision.</source>
            <translation>Charger un modèle les met en pause. Aucune ligne traitée n’est perdue : vous pourrez les reprendre plus tard, avec le même modèle et la même précision.</translation>
        </message>
        <message>
            <source>Pause the jobs</source>
            <translation>Mettre les tâches en pause</translation>
        </message>
    </context>
    <context>
        <name>Attaching</name>
        <message>
            <source>A message takes up to {0} documents: attach the folder that they are in.</source>
            <translation>Un message accepte jusqu’à {0} documents : joignez le dossier qui les contient.</translation>
        </message>
    </context>
    <context>
        <name>AttachmentChip</name>
        <message>
            <source>Remove {0}</source>
            <translation>Retirer {0}</translation>
        </message>
    </context>
    <context>
        <name>Batch</name>
        <message>
            <source>Row {0}</source>
            <translation>Ligne {0}</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} tokens</translation>
        </message>
        <message>
            <source>The row {0}.</source>
            <translation>La ligne : {0}.</translation>
        </message>
        <message>
            <source>(an empty answer)</source>
            <translation>(réponse vide)</translation>
        </message>
        <message>
            <source>Files of prompts</source>
            <translation>Fichiers de prompts</translation>
        </message>
        <message>
            <source>tomorrow {0}</source>
            <translation>demain {0}</translation>
        </message>
        <message>
            <source>d MMM</source>
            <translation>d MMM</translation>
        </message>
        <message>
            <source>d MMM yyyy</source>
            <translation>d MMM yyyy</translation>
        </message>
        <message>
            <source>One row</source>
            <translation>Une ligne</translation>
        </message>
        <message>
            <source>{0} to {1} tokens/s</source>
            <translation>{0} à {1} tokens/s</translation>
        </message>
        <message>
            <source>done between {0} and {1}</source>
            <translation>fini entre {0} et {1}</translation>
        </message>
        <message>
            <source>done at about {0}</source>
            <translation>fini vers {0}</translation>
        </message>
        <message>
            <source>Measured on the trial rows, ±{0}.</source>
            <translation>Mesuré sur les lignes d’essai, ±{0}.</translation>
        </message>
        <message>
            <source>done by {0} even if every answer takes all {1} tokens</source>
            <translation>fini à {0}, même si chaque réponse prend tous ses {1} tokens</translation>
        </message>
        <message>
            <source>Predicted, ±{0}; a trial of the first rows is more exact.</source>
            <translation>Prévu, ±{0} ; un essai des premières lignes est plus précis.</translation>
        </message>
        <message>
            <source>One row at a time: {0} tokens/s.</source>
            <translation>Une ligne à la fois : {0} tokens/s.</translation>
        </message>
        <message>
            <source>Context of these rows: up to {0} of memory.</source>
            <translation>Contexte de ces lignes : jusqu’à {0} de mémoire.</translation>
        </message>
        <message>
            <source>Rows are answered one at a time</source>
            <translation>Les lignes sont traitées une par une</translation>
        </message>
        <message>
            <source>{0} rows share each load of a layer's weights</source>
            <translation>{0} lignes se partagent chaque chargement des poids d’une couche</translation>
        </message>
        <message>
            <source>Measured {2} tokens/s, slower than the {0} to {1} predicted: other programs may be busy, or rows longer than the first ones. The time left is based on the measured rate.</source>
            <translation>Mesuré : {2} tokens/s, plus lent que les {0} à {1} prévus : d’autres programmes sont peut-être actifs, ou les lignes plus longues que les premières. Le temps restant s’appuie sur le débit mesuré.</translation>
        </message>
        <message>
            <source>Measured {2} tokens/s, faster than the {0} to {1} predicted. The time left is based on the measured rate.</source>
            <translation>Mesuré : {2} tokens/s, plus rapide que les {0} à {1} prévus. Le temps restant s’appuie sur le débit mesuré.</translation>
        </message>
        <message>
            <source>Expected: {0} to {1} tokens/s.</source>
            <translation>Attendu : {0} à {1} tokens/s.</translation>
        </message>
        <message>
            <source>Limited by CPU compute.</source>
            <translation>Limité par le calcul du processeur.</translation>
        </message>
        <message>
            <source>Limited by reading weights from RAM.</source>
            <translation>Limité par la lecture des poids en RAM.</translation>
        </message>
        <message>
            <source>Limited by attention on the CPU.</source>
            <translation>Limité par l’attention sur le processeur.</translation>
        </message>
        <message>
            <source>Limited by reading experts from disk.</source>
            <translation>Limité par la lecture des experts sur le disque.</translation>
        </message>
        <message>
            <source>Limited by the link to the card.</source>
            <translation>Limité par la liaison avec la carte.</translation>
        </message>
        <message>
            <source>Limited by GPU compute.</source>
            <translation>Limité par le calcul du GPU.</translation>
        </message>
        <message>
            <source>running</source>
            <translation>en cours</translation>
        </message>
        <message>
            <source>waiting</source>
            <translation>en attente</translation>
        </message>
        <message>
            <source>waiting, place {0}</source>
            <translation>en attente, place {0}</translation>
        </message>
        <message>
            <source>stopping</source>
            <translation>arrêt en cours</translation>
        </message>
        <message>
            <source>paused</source>
            <translation>en pause</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>arrêtée</translation>
        </message>
        <message>
            <source>done</source>
            <translation>terminé</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>échec</translation>
        </message>
        <message>
            <source>runs elsewhere</source>
            <translation>s’exécute ailleurs</translation>
        </message>
        <message>
            <source>1 row done</source>
            <translation>1 ligne traitée</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows done</source>
            <translation>
                <numerusform>{0} ligne traitée</numerusform>
                <numerusform>{0} lignes traitées</numerusform>
            </translation>
        </message>
        <message numerus="yes">
            <source>{0} of {1} rows</source>
            <translation>
                <numerusform>{0} ligne sur {1}</numerusform>
                <numerusform>{0} lignes sur {1}</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} failed</source>
            <translation>{0} en échec</translation>
        </message>
        <message>
            <source>{0} cut off</source>
            <translation>{0} tronquées</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} tokens/s</translation>
        </message>
        <message>
            <source>done by {0} at the latest</source>
            <translation>fini au plus tard {0}</translation>
        </message>
        <message>
            <source>Shares the engine with your chat until the answer is complete.</source>
            <translation>Partage le moteur avec votre discussion jusqu’à la fin de la réponse.</translation>
        </message>
        <message>
            <source>Reading the file…</source>
            <translation>Lecture du fichier…</translation>
        </message>
        <message>
            <source>Starts when the engine is ready.</source>
            <translation>Démarre dès que le moteur est prêt.</translation>
        </message>
        <message>
            <source>Starts when a job before it is done and a model is loaded.</source>
            <translation>Démarre quand une tâche précédente est terminée et qu’un modèle est chargé.</translation>
        </message>
        <message>
            <source>Saving finished rows…</source>
            <translation>Enregistrement des lignes traitées…</translation>
        </message>
        <message>
            <source>Finishing the current layer and saving finished rows…</source>
            <translation>Fin de la couche en cours et enregistrement des lignes traitées…</translation>
        </message>
        <message>
            <source>Another program is working on this job, such as “switchyard batch”.</source>
            <translation>Un autre programme travaille sur cette tâche, par exemple « switchyard batch ».</translation>
        </message>
        <message>
            <source>All rows are in {0}.</source>
            <translation>Toutes les lignes sont dans {0}.</translation>
        </message>
        <message>
            <source>{0} says why rows failed.</source>
            <translation>{0} indique pourquoi des lignes ont échoué.</translation>
        </message>
        <message>
            <source>Column “problem” says why rows failed.</source>
            <translation>La colonne « problem » indique pourquoi des lignes ont échoué.</translation>
        </message>
        <message>
            <source>Stopped: the answered rows are in {0}.</source>
            <translation>Arrêtée : les lignes traitées sont dans {0}.</translation>
        </message>
        <message>
            <source>Resume continues where it stopped.</source>
            <translation>« Reprendre » continue là où la tâche s’est arrêtée.</translation>
        </message>
        <message>
            <source>{0} min {1} s</source>
            <translation>{0} min {1} s</translation>
        </message>
        <message>
            <source>{0} tokens in {1}, {2} tokens/s.</source>
            <translation>{0} tokens en {1}, {2} tokens/s.</translation>
        </message>
        <message>
            <source>{0} s</source>
            <translation>{0} s</translation>
        </message>
        <message>
            <source>Connecting to the Ray cluster…</source>
            <translation>Connexion au cluster Ray…</translation>
        </message>
        <message>
            <source>Asking the servers which models they have…</source>
            <translation>Demande aux serveurs de leurs modèles…</translation>
        </message>
        <message>
            <source>Rows are sent to {0}.</source>
            <translation>Les lignes sont envoyées à {0}.</translation>
        </message>
        <message>
            <source>Rows are sent to {0} on this PC; no text leaves it.</source>
            <translation>Les lignes sont envoyées à {0} sur ce PC ; aucun texte n’en sort.</translation>
        </message>
        <message>
            <source> and to </source>
            <translation> et à </translation>
        </message>
        <message>
            <source>Chats go first on this PC.</source>
            <translation>Les discussions sont prioritaires sur ce PC.</translation>
        </message>
        <message>
            <source>This PC answers your chat first.</source>
            <translation>Ce PC répond d’abord à votre discussion.</translation>
        </message>
        <message>
            <source>The first rows are being answered.</source>
            <translation>Les premières lignes sont en cours de traitement.</translation>
        </message>
        <message>
            <source>Another job shares the engine.</source>
            <translation>Une autre tâche partage le moteur.</translation>
        </message>
        <message>
            <source>{0} other jobs share the engine.</source>
            <translation>{0} autres tâches partagent le moteur.</translation>
        </message>
        <message>
            <source>Chats go on beside it.</source>
            <translation>Les discussions continuent en parallèle.</translation>
        </message>
        <message>
            <source>complete</source>
            <translation>complète</translation>
        </message>
        <message>
            <source>cut off</source>
            <translation>tronquée</translation>
        </message>
        <message>
            <source>context full</source>
            <translation>contexte plein</translation>
        </message>
        <message>
            <source>No text leaves this PC.</source>
            <translation>Aucun texte ne quitte ce PC.</translation>
        </message>
        <message>
            <source>The rows are sent to a server on this PC; no text leaves it.</source>
            <translation>Les lignes sont envoyées à un serveur sur ce PC ; aucun texte n’en sort.</translation>
        </message>
        <message>
            <source>The text of every row may be sent to {0}.</source>
            <translation>Le texte de chaque ligne peut être envoyé à {0}.</translation>
        </message>
        <message>
            <source>that this PC belongs to</source>
            <translation>dont ce PC fait partie</translation>
        </message>
        <message>
            <source>at {0}</source>
            <translation>à {0}</translation>
        </message>
        <message>
            <source>The text of every row is sent to the nodes of the Ray cluster {0}.</source>
            <translation>Le texte de chaque ligne est envoyé aux nœuds du cluster Ray {0}.</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>Ce PC</translation>
        </message>
        <message>
            <source>Not asked: {0}</source>
            <translation>Non sollicité : {0}</translation>
        </message>
        <message>
            <source>Paused, and asked again later: {0}</source>
            <translation>Au repos, sera sollicité à nouveau : {0}</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows at once</source>
            <translation>
                <numerusform>{0} ligne à la fois</numerusform>
                <numerusform>{0} lignes à la fois</numerusform>
            </translation>
        </message>
        <message>
            <source>1 row at once</source>
            <translation>1 ligne à la fois</translation>
        </message>
        <message numerus="yes">
            <source>Measured there on {0} rows: {1} s for a row, {2} tokens read and {3} written.</source>
            <translation>
                <numerusform>Mesuré là-bas sur {0} ligne : {1} s par ligne, {2} tokens lus et {3} écrits.</numerusform>
                <numerusform>Mesuré là-bas sur {0} lignes : {1} s par ligne, {2} tokens lus et {3} écrits.</numerusform>
            </translation>
        </message>
        <message>
            <source>All rows take {0} min at most; asked at once, they take less.</source>
            <translation>Toutes les lignes prennent au plus {0} min ; envoyées ensemble, elles prennent moins.</translation>
        </message>
        <message>
            <source>They cost about {0}.</source>
            <translation>Elles coûtent environ {0}.</translation>
        </message>
        <message>
            <source>{0} row took {1} s, at {2} tokens/s.</source>
            <translation>{0} ligne a pris {1} s, à {2} tokens/s.</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows took {1} s, at {2} tokens/s.</source>
            <translation>
                <numerusform>{0} ligne a pris {1} s, à {2} tokens/s.</numerusform>
                <numerusform>{0} lignes ont pris {1} s, à {2} tokens/s.</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>BatchHead</name>
        <message>
            <source>Batch</source>
            <translation>Lots</translation>
        </message>
        <message>
            <source>Retry failed</source>
            <translation>Relancer échecs</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>Pause</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>Reprendre</translation>
        </message>
        <message>
            <source>Open result</source>
            <translation>Résultat</translation>
        </message>
        <message>
            <source>More</source>
            <translation>Plus</translation>
        </message>
        <message>
            <source>New job</source>
            <translation>Nouvelle tâche</translation>
        </message>
        <message>
            <source>Show in folder</source>
            <translation>Afficher dans le dossier</translation>
        </message>
        <message>
            <source>Stop and keep answers</source>
            <translation>Arrêter et garder les réponses</translation>
        </message>
        <message>
            <source>Start over…</source>
            <translation>Tout recommencer…</translation>
        </message>
        <message>
            <source>Move up in queue</source>
            <translation>Avancer dans la file</translation>
        </message>
        <message>
            <source>Move down in queue</source>
            <translation>Reculer dans la file</translation>
        </message>
        <message>
            <source>Remove from list</source>
            <translation>Retirer de la liste</translation>
        </message>
        <message>
            <source>From a file…</source>
            <translation>Depuis un fichier…</translation>
        </message>
        <message>
            <source>From a folder…</source>
            <translation>Depuis un dossier…</translation>
        </message>
    </context>
    <context>
        <name>BatchHint</name>
        <message>
            <source>Show job</source>
            <translation>Afficher la tâche</translation>
        </message>
        <message>
            <source>The engine stopped, so the batch job is paused; no answered row is lost.</source>
            <translation>Le moteur s’est arrêté : la tâche par lots est en pause ; aucune ligne traitée n’est perdue.</translation>
        </message>
        <message>
            <source>The batch job{0} shares the engine with your chat: both are slower until the answer is complete.</source>
            <translation>La tâche par lots{0} partage le moteur avec votre discussion : les deux sont plus lentes jusqu’à la fin de la réponse.</translation>
        </message>
        <message>
            <source>A batch job is running{0}. Your chats share the engine with it and come first.</source>
            <translation>Une tâche par lots est en cours{0}. Vos discussions partagent le moteur avec elle et passent en premier.</translation>
        </message>
    </context>
    <context>
        <name>BatchJobs</name>
        <message>
            <source>Switchyard was closed before the job started.</source>
            <translation>Switchyard a été fermé avant le début de la tâche.</translation>
        </message>
        <message>
            <source>Switchyard was closed while the job ran; no answered row is lost.</source>
            <translation>Switchyard a été fermé pendant la tâche ; aucune ligne traitée n’est perdue.</translation>
        </message>
        <message>
            <source>The engine was needed for something else, such as another model; no answered row is lost.</source>
            <translation>Le moteur a servi à autre chose, par exemple un autre modèle ; aucune ligne traitée n’est perdue.</translation>
        </message>
        <message>
            <source>The list of jobs could not be saved ({0}).</source>
            <translation>La liste des tâches n’a pas pu être enregistrée ({0}).</translation>
        </message>
    </context>
    <context>
        <name>BatchPage</name>
        <message>
            <source>Batch</source>
            <translation>Lots</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>Your chat's prompt is ready: choose the file whose rows it is to be asked of.</source>
            <translation>Le prompt de votre discussion est prêt : choisissez le fichier dont les lignes le recevront.</translation>
        </message>
        <message>
            <source>{0} has an unsupported file type: use txt, md, csv, tsv, jsonl, parquet, xlsx, pdf, docx or html, or a folder of such files.</source>
            <translation>{0} est d’un type non pris en charge : utilisez txt, md, csv, tsv, jsonl, parquet, xlsx, pdf, docx ou html, ou un dossier de tels fichiers.</translation>
        </message>
        <message numerus="yes">
            <source>{0} more after this one</source>
            <translation>
                <numerusform>Encore {0} fichier après celui-ci</numerusform>
                <numerusform>Encore {0} fichiers après celui-ci</numerusform>
            </translation>
        </message>
        <message>
            <source>Another job is writing {0}: choose another result file.</source>
            <translation>Une autre tâche écrit {0} : choisissez un autre fichier de résultat.</translation>
        </message>
        <message>
            <source>{0} already exists.</source>
            <translation>{0} existe déjà.</translation>
        </message>
        <message>
            <source>Replacing it deletes the answers in it. To keep them, choose another name.</source>
            <translation>Le remplacer supprime les réponses qu’il contient. Pour les garder, choisissez un autre nom.</translation>
        </message>
        <message>
            <source>Replace it</source>
            <translation>Remplacer</translation>
        </message>
        <message>
            <source>Back</source>
            <translation>Retour</translation>
        </message>
        <message>
            <source>Pause the job before you remove it from the list.</source>
            <translation>Mettez la tâche en pause avant de la retirer de la liste.</translation>
        </message>
        <message>
            <source>{0} was removed from the list; its result file stays.</source>
            <translation>{0} a été retiré de la liste ; son fichier de résultat reste.</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>Start this job over?</source>
            <translation>Recommencer cette tâche ?</translation>
        </message>
        <message>
            <source>Its answers are deleted, and its result file is replaced when it is done.</source>
            <translation>Ses réponses sont supprimées, et son fichier de résultat est remplacé à la fin.</translation>
        </message>
        <message>
            <source>Start over</source>
            <translation>Recommencer</translation>
        </message>
        <message>
            <source>1 row was</source>
            <translation>1 ligne a été</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows were</source>
            <translation>
                <numerusform>{0} ligne a été</numerusform>
                <numerusform>{0} lignes ont été</numerusform>
            </translation>
        </message>
        <message>
            <source>This job began with {0}; now {1} is loaded.</source>
            <translation>Cette tâche a commencé avec {0} ; à présent, {1} est chargé.</translation>
        </message>
        <message>
            <source>{0} answered with the first. Load it to resume; chats then use it too. Starting over deletes those answers.</source>
            <translation>{0} traitées avec le premier. Chargez-le pour reprendre ; les discussions l’utiliseront aussi. Recommencer supprime ces réponses.</translation>
        </message>
        <message>
            <source>Load it and resume</source>
            <translation>Le charger et reprendre</translation>
        </message>
        <message>
            <source>{0} does not exist yet: it is written when the job is done, paused or stopped.</source>
            <translation>{0} n’existe pas encore : il est écrit quand la tâche est terminée, en pause ou arrêtée.</translation>
        </message>
        <message>
            <source>Choose a file of prompts</source>
            <translation>Choisir un fichier de prompts</translation>
        </message>
        <message>
            <source>Folder of prompts</source>
            <translation>Dossier de prompts</translation>
        </message>
    </context>
    <context>
        <name>Cache</name>
        <message>
            <source>random</source>
            <translation>aléatoire</translation>
        </message>
        <message>
            <source>static popularity</source>
            <translation>popularité fixe</translation>
        </message>
        <message>
            <source>Evicts the least recently used expert.</source>
            <translation>Évince l’expert utilisé le moins récemment.</translation>
        </message>
        <message>
            <source>Evicts the least frequently used expert.</source>
            <translation>Évince l’expert utilisé le moins souvent.</translation>
        </message>
        <message>
            <source>Evicts an expert that is used rarely and not recently.</source>
            <translation>Évince un expert utilisé rarement et pas récemment.</translation>
        </message>
        <message>
            <source>Evicts the oldest expert.</source>
            <translation>Évince l’expert le plus ancien.</translation>
        </message>
        <message>
            <source>Evicts a random expert.</source>
            <translation>Évince un expert au hasard.</translation>
        </message>
        <message>
            <source>Keeps the most popular experts.</source>
            <translation>Garde les experts les plus populaires.</translation>
        </message>
        <message>
            <source>previous token</source>
            <translation>token précédent</translation>
        </message>
        <message>
            <source>next layer's gate</source>
            <translation>porte de la couche suivante</translation>
        </message>
        <message>
            <source>correlation table</source>
            <translation>table de corrélation</translation>
        </message>
        <message>
            <source>trained network</source>
            <translation>réseau entraîné</translation>
        </message>
    </context>
    <context>
        <name>CacheCard</name>
        <message>
            <source>Cache</source>
            <translation>Cache</translation>
        </message>
        <message>
            <source>Expert cache</source>
            <translation>Cache d’experts</translation>
        </message>
        <message>
            <source>The cache keeps the most used experts where they can be reached fastest. A hit is an expert that was already there when it was needed; a miss has to be copied from slower memory first, or computed there.</source>
            <translation>Le cache garde les experts les plus utilisés là où ils sont le plus vite accessibles. Un succès est un expert déjà présent quand on en a besoin ; en cas de défaut, il faut d’abord le copier d’une mémoire plus lente, ou le calculer là-bas.</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Show this tier's size</source>
            <translation>Afficher la taille de ce niveau</translation>
        </message>
        <message>
            <source>nothing to cache</source>
            <translation>rien à mettre en cache</translation>
        </message>
        <message>
            <source>policy {0}, adopted</source>
            <translation>stratégie {0}, adoptée</translation>
        </message>
        <message>
            <source>policy {0}</source>
            <translation>stratégie {0}</translation>
        </message>
        <message>
            <source>Chosen while running, by each policy's hit rate</source>
            <translation>Choisie en cours d’exécution, selon le taux de succès de chaque stratégie</translation>
        </message>
        <message>
            <source>Here a miss costs no more than a hit, so another size would not be faster.</source>
            <translation>Ici, un défaut ne coûte pas plus qu’un succès : une autre taille ne serait pas plus rapide.</translation>
        </message>
        <message>
            <source>Load a model with experts to see its hit rate and the effect of other cache sizes.</source>
            <translation>Chargez un modèle à experts pour voir son taux de succès et l’effet d’autres tailles de cache.</translation>
        </message>
        <message>
            <source>All experts are in the graphics card's memory: every one is a hit, and nothing is cached.</source>
            <translation>Tous les experts sont dans la mémoire de la carte graphique : chacun est un succès, et rien n’est mis en cache.</translation>
        </message>
        <message>
            <source>All experts are in RAM and computed by the CPU, so there is nothing to cache.</source>
            <translation>Tous les experts sont en RAM et calculés par le processeur : il n’y a rien à mettre en cache.</translation>
        </message>
        <message>
            <source>This model has no experts, so there is nothing to cache.</source>
            <translation>Ce modèle n’a pas d’experts : il n’y a rien à mettre en cache.</translation>
        </message>
    </context>
    <context>
        <name>CallRow</name>
        <message>
            <source>The model wants to call {0}.</source>
            <translation>Le modèle veut appeler {0}.</translation>
        </message>
        <message>
            <source>The model wants to call {0} of the server {1}.</source>
            <translation>Le modèle veut appeler {0} du serveur {1}.</translation>
        </message>
        <message>
            <source>Allow once</source>
            <translation>Autoriser une fois</translation>
        </message>
        <message>
            <source>Allow in this chat</source>
            <translation>Autoriser dans cette discussion</translation>
        </message>
        <message>
            <source>Always allow</source>
            <translation>Toujours autoriser</translation>
        </message>
        <message>
            <source>Deny</source>
            <translation>Refuser</translation>
        </message>
        <message>
            <source>Fold the call</source>
            <translation>Replier l’appel</translation>
        </message>
        <message>
            <source>Show arguments and result</source>
            <translation>Afficher les arguments et le résultat</translation>
        </message>
        <message>
            <source>unfolded</source>
            <translation>déplié</translation>
        </message>
        <message>
            <source>folded</source>
            <translation>replié</translation>
        </message>
        <message>
            <source>Arguments</source>
            <translation>Arguments</translation>
        </message>
        <message>
            <source>Result</source>
            <translation>Résultat</translation>
        </message>
    </context>
    <context>
        <name>Catalogue</name>
        <message>
            <source>Strong at reasoning, mathematics and code, with very long documents; for machines with a lot of memory.</source>
            <translation>Fort en raisonnement, mathématiques et code, avec de très longs documents ; pour les machines dotées de beaucoup de mémoire.</translation>
        </message>
        <message>
            <source>English, Chinese and many others</source>
            <translation>Anglais, chinois et bien d’autres</translation>
        </message>
        <message>
            <source>Reasons step by step before it answers: good at mathematics, code and using tools.</source>
            <translation>Raisonne pas à pas avant de répondre : bon en mathématiques, en code et avec des outils.</translation>
        </message>
        <message>
            <source>English, and others less well</source>
            <translation>Anglais, les autres moins bien</translation>
        </message>
        <message>
            <source>The strongest all-round model for machines with 96 GB or more: knowledge, code and long documents.</source>
            <translation>Le modèle polyvalent le plus fort pour les machines d’au moins 96 Go : connaissances, code et longs documents.</translation>
        </message>
        <message>
            <source>over 100 languages</source>
            <translation>plus de 100 langues</translation>
        </message>
        <message>
            <source>Even-tempered chat, writing and code in European languages, with long documents.</source>
            <translation>Équilibré en discussion, rédaction et code dans les langues européennes, avec de longs documents.</translation>
        </message>
        <message>
            <source>English, French, German, Spanish, Italian and others</source>
            <translation>Anglais, français, allemand, espagnol, italien et autres</translation>
        </message>
        <message>
            <source>Good at writing code over many steps and at using tools; can think before it answers.</source>
            <translation>Bon pour écrire du code en de nombreuses étapes et utiliser des outils ; peut réfléchir avant de répondre.</translation>
        </message>
        <message>
            <source>English and Chinese</source>
            <translation>Anglais et chinois</translation>
        </message>
        <message>
            <source>Much knowledge for its speed; answers directly, and keeps its pace with very long texts.</source>
            <translation>Beaucoup de connaissances pour sa vitesse ; répond directement et garde son allure avec de très longs textes.</translation>
        </message>
        <message>
            <source>The best all-round choice for PCs with 32 GB: chat, code, reasoning and long documents.</source>
            <translation>Le meilleur choix polyvalent pour les PC de 32 Go : discussion, code, raisonnement et longs documents.</translation>
        </message>
        <message>
            <source>Natural writing in very many languages, general knowledge and summaries.</source>
            <translation>Rédaction naturelle dans de très nombreuses langues, culture générale et résumés.</translation>
        </message>
        <message>
            <source>over 140 languages</source>
            <translation>plus de 140 langues</translation>
        </message>
        <message>
            <source>Reasons before it answers; good at mathematics, science and following instructions exactly.</source>
            <translation>Raisonne avant de répondre ; bon en mathématiques, en sciences et pour suivre exactement les instructions.</translation>
        </message>
        <message>
            <source>English, and five others less well</source>
            <translation>Anglais, cinq autres moins bien</translation>
        </message>
        <message>
            <source>Writes code over many steps and uses tools well for its size.</source>
            <translation>Écrit du code en de nombreuses étapes et utilise bien les outils pour sa taille.</translation>
        </message>
        <message>
            <source>Reasons step by step and is quick: good at mathematics and code on PCs with 16 GB.</source>
            <translation>Raisonne pas à pas et vite : bon en mathématiques et en code sur les PC de 16 Go.</translation>
        </message>
        <message>
            <source>Made for programming: writes, explains and changes code in many languages.</source>
            <translation>Fait pour la programmation : écrit, explique et modifie du code dans de nombreux langages.</translation>
        </message>
        <message>
            <source>A quick all-rounder that answers directly: chat, translation, summaries.</source>
            <translation>Un modèle polyvalent et rapide qui répond directement : discussion, traduction, résumés.</translation>
        </message>
        <message>
            <source>Careful writing in European languages; uses every weight for every token, so it wants a large graphics card.</source>
            <translation>Rédaction soignée dans les langues européennes ; utilise tous les poids pour chaque token, il lui faut donc une grande carte graphique.</translation>
        </message>
        <message>
            <source>Follows instructions and fills in forms and JSON reliably; little memory for long texts.</source>
            <translation>Suit les instructions et remplit formulaires et JSON de façon fiable ; retient peu des longs textes.</translation>
        </message>
        <message>
            <source>English, German, Spanish, French, Japanese and seven others</source>
            <translation>Anglais, allemand, espagnol, français, japonais et sept autres</translation>
        </message>
        <message>
            <source>General knowledge and writing in Chinese and English at good speed.</source>
            <translation>Culture générale et rédaction en chinois et en anglais, à bonne vitesse.</translation>
        </message>
        <message>
            <source>Chinese and English</source>
            <translation>Chinois et anglais</translation>
        </message>
        <message>
            <source>Pleasant writing in many languages; for graphics cards with 12 GB.</source>
            <translation>Rédaction agréable dans de nombreuses langues ; pour les cartes graphiques de 12 Go.</translation>
        </message>
        <message>
            <source>A solid small model that can think before it answers; for graphics cards with 8 GB.</source>
            <translation>Un petit modèle solide qui peut réfléchir avant de répondre ; pour les cartes graphiques de 8 Go.</translation>
        </message>
        <message>
            <source>An older model, known from many papers: good for comparisons.</source>
            <translation>Un modèle plus ancien, connu de nombreux articles : bon pour les comparaisons.</translation>
        </message>
        <message>
            <source>English, French, German, Spanish, Italian</source>
            <translation>Anglais, français, allemand, espagnol, italien</translation>
        </message>
        <message>
            <source>Reasoning and mathematics from textbook-like training; an older model.</source>
            <translation>Raisonnement et mathématiques issus d’un entraînement de type manuel ; un modèle plus ancien.</translation>
        </message>
        <message>
            <source>English and 22 others</source>
            <translation>Anglais et 22 autres</translation>
        </message>
        <message>
            <source>Very quick even without a graphics card: summaries, extraction, simple chat.</source>
            <translation>Très rapide même sans carte graphique : résumés, extraction, discussion simple.</translation>
        </message>
        <message>
            <source>English, Chinese, German, Spanish, French, Japanese and others</source>
            <translation>Anglais, chinois, allemand, espagnol, français, japonais et autres</translation>
        </message>
        <message>
            <source>Small and quick: forms, JSON, summaries and tools on old laptops.</source>
            <translation>Petit et rapide : formulaires, JSON, résumés et outils sur de vieux portables.</translation>
        </message>
        <message>
            <source>Surprisingly able for its size; for small graphics cards and long texts.</source>
            <translation>Étonnamment capable pour sa taille ; pour les petites cartes graphiques et les longs textes.</translation>
        </message>
        <message>
            <source>Small, with a good sense for numbers and instructions.</source>
            <translation>Petit, avec un bon sens des nombres et des instructions.</translation>
        </message>
        <message>
            <source>Small and open in every respect: weights, data and recipe.</source>
            <translation>Petit et ouvert à tous égards : poids, données et recette.</translation>
        </message>
        <message>
            <source>English, French, Spanish, German, Italian, Portuguese</source>
            <translation>Anglais, français, espagnol, allemand, italien, portugais</translation>
        </message>
        <message>
            <source>Open in every respect, and very quick; short texts only.</source>
            <translation>Ouvert à tous égards et très rapide ; textes courts seulement.</translation>
        </message>
        <message>
            <source>English</source>
            <translation>Anglais</translation>
        </message>
    </context>
    <context>
        <name>Chat</name>
        <message>
            <source>The model wrote no summary: leave the oldest turns out, or try another model.</source>
            <translation>Le modèle n’a pas écrit de résumé : omettez les échanges les plus anciens, ou essayez un autre modèle.</translation>
        </message>
        <message>
            <source>Attach a folder</source>
            <translation>Joindre un dossier</translation>
        </message>
        <message>
            <source>Pictures ({0})</source>
            <translation>Images ({0})</translation>
        </message>
        <message>
            <source>All files (*)</source>
            <translation>Tous les fichiers (*)</translation>
        </message>
        <message>
            <source>Attach files</source>
            <translation>Joindre des fichiers</translation>
        </message>
        <message>
            <source>Markdown and JSON of every chat (*.zip)</source>
            <translation>Markdown et JSON de toutes les discussions (*.zip)</translation>
        </message>
        <message>
            <source>Markdown, as shown (*.md)</source>
            <translation>Markdown, comme affiché (*.md)</translation>
        </message>
        <message>
            <source>PDF, as shown (*.pdf)</source>
            <translation>PDF, comme affiché (*.pdf)</translation>
        </message>
        <message>
            <source>Web page, as shown (*.html)</source>
            <translation>Page web, comme affiché (*.html)</translation>
        </message>
        <message>
            <source>JSON, with all versions and branches (*.json)</source>
            <translation>JSON, avec toutes les versions et branches (*.json)</translation>
        </message>
        <message>
            <source>Switchyard chats</source>
            <translation>Discussions Switchyard</translation>
        </message>
        <message>
            <source>Export</source>
            <translation>Exporter</translation>
        </message>
        <message>
            <source>Chats of Switchyard, ChatGPT and LM Studio (*.zip *.json *.md *.markdown)</source>
            <translation>Discussions de Switchyard, ChatGPT et LM Studio (*.zip *.json *.md *.markdown)</translation>
        </message>
        <message>
            <source>Import chats</source>
            <translation>Importer des discussions</translation>
        </message>
        <message>
            <source>The import was cancelled; what was imported until then stays.</source>
            <translation>L’importation a été annulée ; ce qui était déjà importé reste.</translation>
        </message>
        <message>
            <source>1 chat</source>
            <translation>1 discussion</translation>
        </message>
        <message numerus="yes">
            <source>{0} chats</source>
            <translation>
                <numerusform>{0} discussion</numerusform>
                <numerusform>{0} discussions</numerusform>
            </translation>
        </message>
        <message>
            <source>1 that was here has new messages.</source>
            <translation>1 déjà présente a de nouveaux messages.</translation>
        </message>
        <message numerus="yes">
            <source>{0} that were here have new messages.</source>
            <translation>
                <numerusform>{0} déjà présente a de nouveaux messages.</numerusform>
                <numerusform>{0} déjà présentes ont de nouveaux messages.</numerusform>
            </translation>
        </message>
        <message>
            <source>1 was already here and is unchanged.</source>
            <translation>1 était déjà présente et reste inchangée.</translation>
        </message>
        <message numerus="yes">
            <source>{0} were already here and are unchanged.</source>
            <translation>
                <numerusform>{0} était déjà présente et reste inchangée.</numerusform>
                <numerusform>{0} étaient déjà présentes et restent inchangées.</numerusform>
            </translation>
        </message>
        <message>
            <source>1 chat is damaged and could not be read.</source>
            <translation>1 discussion est endommagée et n’a pas pu être lue.</translation>
        </message>
        <message numerus="yes">
            <source>{0} chats are damaged and could not be read.</source>
            <translation>
                <numerusform>{0} discussion est endommagée et n’a pas pu être lue.</numerusform>
                <numerusform>{0} discussions sont endommagées et n’ont pas pu être lues.</numerusform>
            </translation>
        </message>
        <message>
            <source>The file ends in the middle: what comes after that is not in it.</source>
            <translation>Le fichier s’arrête au milieu : la suite n’y est pas.</translation>
        </message>
        <message>
            <source>Left out: {0}.</source>
            <translation>Laissé de côté : {0}.</translation>
        </message>
        <message>
            <source>{0} was not imported: {1}.</source>
            <translation>{0} n’a pas été importé : {1}.</translation>
        </message>
        <message numerus="yes">
            <source>Neither were {0} other files.</source>
            <translation>
                <numerusform>Pas plus que {0} autre fichier.</numerusform>
                <numerusform>Pas plus que {0} autres fichiers.</numerusform>
            </translation>
        </message>
        <message>
            <source>Imported: {0}.</source>
            <translation>Importé : {0}.</translation>
        </message>
        <message>
            <source>tool calls ({0})</source>
            <translation>appels d’outils ({0})</translation>
        </message>
        <message>
            <source>pictures ({0})</source>
            <translation>images ({0})</translation>
        </message>
        <message>
            <source>attached files ({0})</source>
            <translation>fichiers joints ({0})</translation>
        </message>
        <message>
            <source>settings of single chats ({0})</source>
            <translation>réglages de certaines discussions ({0})</translation>
        </message>
        <message>
            <source>chats without messages ({0})</source>
            <translation>discussions sans messages ({0})</translation>
        </message>
        <message>
            <source>parts of an unknown kind ({0})</source>
            <translation>éléments de type inconnu ({0})</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>Nouvelle discussion</translation>
        </message>
        <message>
            <source>Scratch chat</source>
            <translation>Discussion temporaire</translation>
        </message>
        <message>
            <source>Scratch, not stored</source>
            <translation>Temporaire, non enregistrée</translation>
        </message>
        <message>
            <source>Folders</source>
            <translation>Dossiers</translation>
        </message>
        <message>
            <source>Pinned</source>
            <translation>Épinglées</translation>
        </message>
        <message>
            <source>Today</source>
            <translation>Aujourd’hui</translation>
        </message>
        <message>
            <source>Yesterday</source>
            <translation>Hier</translation>
        </message>
        <message>
            <source>Previous 7 days</source>
            <translation>7 derniers jours</translation>
        </message>
        <message>
            <source>Older</source>
            <translation>Plus anciennes</translation>
        </message>
        <message>
            <source>Found</source>
            <translation>Trouvées</translation>
        </message>
        <message>
            <source>Fold earlier turns</source>
            <translation>Résumer les échanges précédents</translation>
        </message>
        <message>
            <source>The model summarises them, and reads the summary instead.</source>
            <translation>Le modèle les résume, puis lit le résumé à leur place.</translation>
        </message>
        <message>
            <source>Leave out the oldest</source>
            <translation>Omettre les plus anciens</translation>
        </message>
        <message>
            <source>The model reads nothing of them; they are kept.</source>
            <translation>Le modèle n’en lit rien ; ils sont conservés.</translation>
        </message>
        <message>
            <source>Ask in a new chat</source>
            <translation>Demander dans une nouvelle discussion</translation>
        </message>
        <message>
            <source>Send anyway</source>
            <translation>Envoyer quand même</translation>
        </message>
        <message>
            <source>Not now</source>
            <translation>Pas maintenant</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>The earlier turns were not folded: {0}</source>
            <translation>Les échanges précédents n’ont pas été résumés : {0}</translation>
        </message>
        <message>
            <source>Delete its chat, too</source>
            <translation>Supprimer aussi sa discussion</translation>
        </message>
        <message numerus="yes">
            <source>Delete its {0} chats, too</source>
            <translation>
                <numerusform>Supprimer aussi sa {0} discussion</numerusform>
                <numerusform>Supprimer aussi ses {0} discussions</numerusform>
            </translation>
        </message>
        <message>
            <source>Delete the folder “{0}”?</source>
            <translation>Supprimer le dossier « {0} » ?</translation>
        </message>
        <message>
            <source>Its chats can stay, outside of any folder. Either way you can undo it.</source>
            <translation>Ses discussions peuvent rester, hors de tout dossier. Les deux choix sont annulables.</translation>
        </message>
        <message>
            <source>Delete only the folder</source>
            <translation>Supprimer seulement le dossier</translation>
        </message>
        <message>
            <source>The folder “{0}” was deleted.</source>
            <translation>Le dossier « {0} » a été supprimé.</translation>
        </message>
        <message>
            <source>New folder</source>
            <translation>Nouveau dossier</translation>
        </message>
        <message>
            <source>New folder {0}</source>
            <translation>Nouveau dossier {0}</translation>
        </message>
        <message>
            <source>The message was deleted.</source>
            <translation>Le message a été supprimé.</translation>
        </message>
        <message>
            <source>The message was changed.</source>
            <translation>Le message a été modifié.</translation>
        </message>
        <message>
            <source>Earlier turns are folded into a summary.</source>
            <translation>Les échanges précédents sont résumés.</translation>
        </message>
        <message>
            <source>The oldest turns are left out of what the model reads.</source>
            <translation>Les échanges les plus anciens ne sont plus lus par le modèle.</translation>
        </message>
        <message>
            <source>The turns are sent as they are again.</source>
            <translation>Les échanges sont de nouveau envoyés tels quels.</translation>
        </message>
        <message>
            <source>The summary was changed.</source>
            <translation>Le résumé a été modifié.</translation>
        </message>
        <message>
            <source>An answer is being written here: wait for it, or stop it first.</source>
            <translation>Une réponse est en cours d’écriture ici : attendez-la, ou arrêtez-la d’abord.</translation>
        </message>
        <message>
            <source>waiting for the engine, which is not running</source>
            <translation>attend le moteur, qui n’est pas en marche</translation>
        </message>
        <message>
            <source>waiting for a model: none is loaded</source>
            <translation>attend un modèle : aucun n’est chargé</translation>
        </message>
        <message>
            <source>waiting for the model to load</source>
            <translation>attend que le modèle soit chargé</translation>
        </message>
        <message>
            <source>searching the documents</source>
            <translation>consulte les documents</translation>
        </message>
        <message>
            <source>starting the servers with the tools</source>
            <translation>démarrage des serveurs d’outils</translation>
        </message>
        <message>
            <source>waiting for you to allow a call</source>
            <translation>attend votre autorisation pour un appel</translation>
        </message>
        <message>
            <source>waiting for a tool</source>
            <translation>attend un outil</translation>
        </message>
        <message>
            <source>waiting for another answer</source>
            <translation>attend une autre réponse</translation>
        </message>
        <message>
            <source>waiting for the first token from the other server</source>
            <translation>attend le premier token de l’autre serveur</translation>
        </message>
        <message>
            <source>reading the prompt</source>
            <translation>lit le prompt</translation>
        </message>
        <message>
            <source>thinking</source>
            <translation>réfléchit</translation>
        </message>
        <message>
            <source>writing</source>
            <translation>écrit</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} tokens/s</translation>
        </message>
        <message>
            <source>first token {0} s</source>
            <translation>premier token après {0} s</translation>
        </message>
        <message>
            <source>1 token</source>
            <translation>1 token</translation>
        </message>
        <message numerus="yes">
            <source>{0} tokens</source>
            <translation>
                <numerusform>{0} token</numerusform>
                <numerusform>{0} tokens</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} of {1} drafted tokens accepted</source>
            <translation>{0} tokens proposés sur {1} acceptés</translation>
        </message>
        <message>
            <source>reached the limit</source>
            <translation>limite atteinte</translation>
        </message>
        <message>
            <source>the context is full</source>
            <translation>le contexte est plein</translation>
        </message>
        <message>
            <source>edited</source>
            <translation>modifié</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>arrêtée</translation>
        </message>
        <message>
            <source>picture read before</source>
            <translation>image déjà lue</translation>
        </message>
        <message>
            <source>picture read in {0} s</source>
            <translation>image lue en {0} s</translation>
        </message>
        <message>
            <source>{0} pictures read in {1} s</source>
            <translation>{0} images lues en {1} s</translation>
        </message>
        <message>
            <source>{0} pictures read before</source>
            <translation>{0} images déjà lues</translation>
        </message>
        <message>
            <source>{0} of {1} pictures read before, the others in {2} s</source>
            <translation>{0} images sur {1} déjà lues, les autres en {2} s</translation>
        </message>
        <message>
            <source>Thinking… {0}</source>
            <translation>Réflexion… {0}</translation>
        </message>
        <message>
            <source>Thought</source>
            <translation>Réflexion</translation>
        </message>
        <message>
            <source>Thought for {0}</source>
            <translation>A réfléchi {0}</translation>
        </message>
        <message>
            <source>The answer is incomplete.</source>
            <translation>La réponse est incomplète.</translation>
        </message>
        <message>
            <source>The text so far is kept.</source>
            <translation>Le texte déjà écrit est conservé.</translation>
        </message>
        <message>
            <source>Your message is kept: make room, edit it, or start a new chat.</source>
            <translation>Votre message est conservé : faites de la place, modifiez-le ou commencez une nouvelle discussion.</translation>
        </message>
        <message>
            <source>The context was full before the answer began: make room, and ask again.</source>
            <translation>Le contexte était plein avant le début de la réponse : faites de la place, puis redemandez.</translation>
        </message>
        <message>
            <source>It was still thinking when it reached the limit: raise Max tokens, or let it think less.</source>
            <translation>Le modèle réfléchissait encore à la limite : augmentez « Tokens max. », ou laissez-le moins réfléchir.</translation>
        </message>
        <message>
            <source>The answer ran into the end of the context: make room, and let it continue.</source>
            <translation>La réponse a atteint la fin du contexte : faites de la place, puis laissez-la continuer.</translation>
        </message>
        <message>
            <source>{0} tokens of context</source>
            <translation>{0} tokens de contexte</translation>
        </message>
        <message>
            <source>for new chats</source>
            <translation>pour les nouvelles discussions</translation>
        </message>
        <message>
            <source>sees pictures</source>
            <translation>voit les images</translation>
        </message>
        <message>
            <source>default</source>
            <translation>par défaut</translation>
        </message>
        <message>
            <source>loaded</source>
            <translation>chargé</translation>
        </message>
        <message>
            <source>measured</source>
            <translation>mesuré</translation>
        </message>
        <message>
            <source>predicted</source>
            <translation>prévu</translation>
        </message>
        <message>
            <source>The only model there</source>
            <translation>Le seul modèle là-bas</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Modèle de départ</translation>
        </message>
        <message>
            <source>Sent to {0}, another program on this PC</source>
            <translation>Envoyé à {0}, un autre programme sur ce PC</translation>
        </message>
        <message>
            <source>Sent to {0}</source>
            <translation>Envoyé à {0}</translation>
        </message>
        <message>
            <source>{0}: what you write in this chat stays on this PC.</source>
            <translation>{0} : ce que vous écrivez dans cette discussion reste sur ce PC.</translation>
        </message>
        <message>
            <source>{0}: what you write in this chat leaves this PC.</source>
            <translation>{0} : ce que vous écrivez dans cette discussion quitte ce PC.</translation>
        </message>
        <message>
            <source>top-k</source>
            <translation>top-k</translation>
        </message>
        <message>
            <source>min-p</source>
            <translation>min-p</translation>
        </message>
        <message>
            <source>the repetition penalty</source>
            <translation>la pénalité de répétition</translation>
        </message>
        <message>
            <source>loop guard</source>
            <translation>l’anti-boucle</translation>
        </message>
        <message>
            <source>beam search</source>
            <translation>la recherche en faisceau</translation>
        </message>
        <message>
            <source>how much to think</source>
            <translation>le niveau de réflexion</translation>
        </message>
        <message>
            <source>It does not take this chat's {0}.</source>
            <translation>Non pris en compte pour cette discussion : {0}.</translation>
        </message>
        <message>
            <source>{0} of {1} reads text only: choose another model to send pictures.</source>
            <translation>{0} de {1} ne lit que du texte : choisissez un autre modèle pour envoyer des images.</translation>
        </message>
        <message>
            <source>The model</source>
            <translation>Le modèle</translation>
        </message>
        <message>
            <source>{0} reads text only.</source>
            <translation>{0} ne lit que du texte.</translation>
        </message>
        <message>
            <source>No model on this PC sees pictures.</source>
            <translation>Aucun modèle sur ce PC ne voit les images.</translation>
        </message>
        <message>
            <source>{0} and {1} more</source>
            <translation>{0} et {1} autres</translation>
        </message>
        <message>
            <source>On this PC these see pictures: {0}.</source>
            <translation>Sur ce PC, ces modèles voient les images : {0}.</translation>
        </message>
        <message>
            <source>Your message has about {0} tokens; the model reads {1}. Shorten it.</source>
            <translation>Votre message compte environ {0} tokens ; le modèle en lit {1}. Raccourcissez-le.</translation>
        </message>
        <message>
            <source>With your message this chat has about {0} tokens; the model reads {1}. Make room, or ask in a new chat.</source>
            <translation>Avec votre message, cette discussion compte environ {0} tokens ; le modèle en lit {1}. Faites de la place, ou demandez dans une nouvelle discussion.</translation>
        </message>
        <message>
            <source>With your message this chat has about {0} tokens; the model reads {1}. Ask in a new chat.</source>
            <translation>Avec votre message, cette discussion compte environ {0} tokens ; le modèle en lit {1}. Demandez dans une nouvelle discussion.</translation>
        </message>
        <message>
            <source>This chat takes {0} of the {1} tokens the model reads. Make room before it is full.</source>
            <translation>Cette discussion occupe {0} des {1} tokens que lit le modèle. Faites de la place avant que le contexte soit plein.</translation>
        </message>
        <message>
            <source>The context is full: {0} of {1} tokens are taken. Make room, or ask in a new chat.</source>
            <translation>Le contexte est plein : {0} tokens sur {1} sont occupés. Faites de la place, ou demandez dans une nouvelle discussion.</translation>
        </message>
        <message>
            <source>The earlier turns are summarised once the model is idle.</source>
            <translation>Les échanges précédents seront résumés dès que le modèle sera libre.</translation>
        </message>
        <message>
            <source>Summarising the earlier turns… {0}. Your messages come first.</source>
            <translation>Résumé des échanges précédents… {0}. Vos messages passent en premier.</translation>
        </message>
        <message>
            <source>Reading… {0}</source>
            <translation>Lecture… {0}</translation>
        </message>
        <message>
            <source>Reading…</source>
            <translation>Lecture…</translation>
        </message>
        <message>
            <source>folder</source>
            <translation>Dossier</translation>
        </message>
        <message>
            <source>file</source>
            <translation>Fichier</translation>
        </message>
        <message>
            <source>This {0} {1}.</source>
            <translation>{0} : {1}.</translation>
        </message>
        <message>
            <source>Not read yet</source>
            <translation>Pas encore lu</translation>
        </message>
        <message>
            <source>1 file</source>
            <translation>1 fichier</translation>
        </message>
        <message numerus="yes">
            <source>{0} files</source>
            <translation>
                <numerusform>{0} fichier</numerusform>
                <numerusform>{0} fichiers</numerusform>
            </translation>
        </message>
        <message>
            <source>1 page</source>
            <translation>1 page</translation>
        </message>
        <message numerus="yes">
            <source>{0} pages</source>
            <translation>
                <numerusform>{0} page</numerusform>
                <numerusform>{0} pages</numerusform>
            </translation>
        </message>
        <message>
            <source>about {0} tokens</source>
            <translation>environ {0} tokens</translation>
        </message>
        <message>
            <source>goes to {0}</source>
            <translation>va vers {0}</translation>
        </message>
        <message>
            <source>page {0}</source>
            <translation>page {0}</translation>
        </message>
        <message>
            <source>There was no room for {0} beside this chat: ask in a new chat, or shorten this one.</source>
            <translation>Il n’y avait pas de place pour {0} à côté de cette discussion : demandez dans une nouvelle, ou raccourcissez celle-ci.</translation>
        </message>
        <message>
            <source>The documents could not be searched ({0}), so the answer is given without them.</source>
            <translation>Les documents n’ont pas pu être consultés ({0}) : la réponse est donnée sans eux.</translation>
        </message>
        <message>
            <source>It reads text only: the pictures in this chat are not sent.</source>
            <translation>Il ne lit que du texte : les images de cette discussion ne sont pas envoyées.</translation>
        </message>
        <message>
            <source>This model reads text only: the pictures in this chat are not read.</source>
            <translation>Ce modèle ne lit que du texte : les images de cette discussion ne sont pas lues.</translation>
        </message>
        <message>
            <source>The server {0} is no longer in the list, and nothing else answers here: choose a model for this chat.</source>
            <translation>Le serveur {0} n’est plus dans la liste, et rien d’autre ne répond ici : choisissez un modèle pour cette discussion.</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1 thread</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0} thread</numerusform>
                <numerusform>{0} threads</numerusform>
            </translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>Chat</source>
            <translation>Discussion</translation>
        </message>
        <message>
            <source>Please continue.</source>
            <translation>Continue, s’il te plaît.</translation>
        </message>
        <message>
            <source>Branch: {0}</source>
            <translation>Branche : {0}</translation>
        </message>
        <message>
            <source>Picture</source>
            <translation>Image</translation>
        </message>
        <message>
            <source>Custom</source>
            <translation>Personnalisé</translation>
        </message>
        <message>
            <source>Precise</source>
            <translation>Précis</translation>
        </message>
        <message>
            <source>Balanced</source>
            <translation>Équilibré</translation>
        </message>
        <message>
            <source>Creative</source>
            <translation>Créatif</translation>
        </message>
        <message>
            <source>{0} beams</source>
            <translation>{0} faisceaux</translation>
        </message>
        <message>
            <source>always the likeliest token</source>
            <translation>toujours le token le plus probable</translation>
        </message>
        <message>
            <source>temperature {0}</source>
            <translation>température {0}</translation>
        </message>
        <message>
            <source>top-k {0}</source>
            <translation>top-k {0}</translation>
        </message>
        <message>
            <source>top-p {0}</source>
            <translation>top-p {0}</translation>
        </message>
        <message>
            <source>min-p {0}</source>
            <translation>min-p {0}</translation>
        </message>
        <message>
            <source>repetition penalty {0}</source>
            <translation>pénalité de répétition {0}</translation>
        </message>
        <message>
            <source>presence penalty {0}</source>
            <translation>pénalité de présence {0}</translation>
        </message>
        <message>
            <source>frequency penalty {0}</source>
            <translation>pénalité de fréquence {0}</translation>
        </message>
        <message>
            <source>loop guard {0}</source>
            <translation>anti-boucle {0}</translation>
        </message>
        <message>
            <source>thinking {0}</source>
            <translation>réflexion : {0}</translation>
        </message>
    </context>
    <context>
        <name>ChatDocument</name>
        <message>
            <source>Chat</source>
            <translation>Discussion</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>Prompt système</translation>
        </message>
        <message>
            <source>nothing could be written there</source>
            <translation>rien n’a pu y être écrit</translation>
        </message>
        <message>
            <source>Assistant</source>
            <translation>Assistant</translation>
        </message>
        <message>
            <source>You</source>
            <translation>Vous</translation>
        </message>
        <message>
            <source>Thoughts</source>
            <translation>Réflexions</translation>
        </message>
        <message>
            <source>picture</source>
            <translation>image</translation>
        </message>
    </context>
    <context>
        <name>ChatFiles</name>
        <message>
            <source>The export was cancelled; no file was written.</source>
            <translation>L’exportation a été annulée ; aucun fichier n’a été écrit.</translation>
        </message>
        <message>
            <source>Chat</source>
            <translation>Discussion</translation>
        </message>
    </context>
    <context>
        <name>ChatStore</name>
        <message>
            <source>The chats in {path} were written by a newer Switchyard and are not changed. Chats made now are lost when the window closes: update Switchyard first.</source>
            <translation>Les discussions de {path} ont été écrites par un Switchyard plus récent et ne sont pas modifiées. Celles d’aujourd’hui seront perdues à la fermeture de la fenêtre : mettez d’abord Switchyard à jour.</translation>
        </message>
        <message>
            <source>{folder} is read-only, so you can read your chats but not save new ones: what you write now is lost when the window closes. Make the folder writable and restart Switchyard.</source>
            <translation>{folder} est en lecture seule : vous pouvez lire vos discussions, mais pas en enregistrer. Ce que vous écrivez maintenant sera perdu à la fermeture de la fenêtre. Autorisez l’écriture dans ce dossier et redémarrez Switchyard.</translation>
        </message>
        <message>
            <source>The chat database was damaged. Recovered chats: {conversations}, messages: {messages}; messages lost: {lost}. The damaged file is kept as {path}.</source>
            <translation>La base des discussions était endommagée. Discussions récupérées : {conversations}, messages : {messages} ; messages perdus : {lost}. Le fichier endommagé est conservé sous {path}.</translation>
        </message>
        <message>
            <source>The chat database was damaged and has been repaired (chats: {conversations}, messages: {messages}); no message seems to be missing. The damaged file is kept as {path}.</source>
            <translation>La base des discussions était endommagée et a été réparée (discussions : {conversations}, messages : {messages}) ; aucun message ne semble manquer. Le fichier endommagé est conservé sous {path}.</translation>
        </message>
        <message>
            <source>The chat database was damaged and no message could be read from it. The damaged file is kept as {path}.</source>
            <translation>La base des discussions était endommagée et aucun message n’a pu en être lu. Le fichier endommagé est conservé sous {path}.</translation>
        </message>
        <message>
            <source>The disk is full, so new text is not saved: free some space on the disk of {folder}.</source>
            <translation>Le disque est plein, le nouveau texte n’est donc pas enregistré : libérez de l’espace sur le disque de {folder}.</translation>
        </message>
        <message>
            <source>Another program is using the chats in {folder}, so new text is not saved: close it.</source>
            <translation>Un autre programme utilise les discussions de {folder}, le nouveau texte n’est donc pas enregistré : fermez-le.</translation>
        </message>
        <message>
            <source>Chats cannot be saved in {folder} ({why}): check that it can be written to.</source>
            <translation>Les discussions ne peuvent pas être enregistrées dans {folder} ({why}) : vérifiez que l’écriture y est possible.</translation>
        </message>
        <message>
            <source>Switchyard closed during this answer.</source>
            <translation>Switchyard s’est fermé pendant cette réponse.</translation>
        </message>
    </context>
    <context>
        <name>ChatTransfer</name>
        <message>
            <source>Cancel</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>Writing {0}…</source>
            <translation>Écriture de {0}…</translation>
        </message>
        <message numerus="yes">
            <source>{0} files</source>
            <translation>
                <numerusform>{0} fichier</numerusform>
                <numerusform>{0} fichiers</numerusform>
            </translation>
        </message>
        <message>
            <source>Importing {0}…</source>
            <translation>Importation de {0}…</translation>
        </message>
        <message>
            <source>{0} {1}, {2} chats so far</source>
            <translation>{0} {1}, {2} discussions jusqu’ici</translation>
        </message>
        <message>
            <source>Written to {0}</source>
            <translation>Enregistré dans {0}</translation>
        </message>
    </context>
    <context>
        <name>ChatView</name>
        <message>
            <source>Dismiss</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>Keep this chat</source>
            <translation>La conserver</translation>
        </message>
        <message>
            <source>Close for good</source>
            <translation>Fermer définitivement</translation>
        </message>
        <message>
            <source>The starter is a small demo model: it gets facts wrong and may repeat itself.</source>
            <translation>Le modèle de départ est un petit modèle de démonstration : il se trompe sur les faits et se répète parfois.</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>Nouvelle discussion</translation>
        </message>
        <message>
            <source>Find in this chat</source>
            <translation>Rechercher dans cette discussion</translation>
        </message>
        <message>
            <source>Next match</source>
            <translation>Résultat suivant</translation>
        </message>
        <message>
            <source>Previous match</source>
            <translation>Résultat précédent</translation>
        </message>
        <message>
            <source>New scratch chat, which is never stored</source>
            <translation>Nouvelle discussion temporaire, jamais enregistrée</translation>
        </message>
        <message>
            <source>Search chats</source>
            <translation>Rechercher</translation>
        </message>
        <message>
            <source>Choose the model</source>
            <translation>Choisir le modèle</translation>
        </message>
        <message>
            <source>Rename chat</source>
            <translation>Renommer la discussion</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>Arrêter la réponse</translation>
        </message>
        <message>
            <source>Undo the last deletion or change of a chat</source>
            <translation>Annuler la dernière suppression ou modification d’une discussion</translation>
        </message>
        <message>
            <source>Previous chat</source>
            <translation>Discussion précédente</translation>
        </message>
        <message>
            <source>Next chat</source>
            <translation>Discussion suivante</translation>
        </message>
        <message>
            <source>Attach files</source>
            <translation>Joindre des fichiers</translation>
        </message>
        <message>
            <source>Print the chat</source>
            <translation>Imprimer la discussion</translation>
        </message>
        <message>
            <source>Ask two, side by side</source>
            <translation>Demander à deux, côte à côte</translation>
        </message>
        <message>
            <source>Write a message</source>
            <translation>Écrire un message</translation>
        </message>
        <message>
            <source>Enter</source>
            <translation>Entrée</translation>
        </message>
        <message>
            <source>Send</source>
            <translation>Envoyer</translation>
        </message>
        <message>
            <source>Shift+Enter</source>
            <translation>Maj+Entrée</translation>
        </message>
        <message>
            <source>Start a new line</source>
            <translation>Commencer une nouvelle ligne</translation>
        </message>
        <message>
            <source>The whole chat goes there, now and with each further message: your messages, their pictures and what is read of their documents, the answers and the system prompt. What happens with it is up to who runs that server.</source>
            <translation>Toute la discussion y est envoyée, maintenant et avec chaque nouveau message : vos messages, leurs images et ce qui est lu de leurs documents, les réponses et le prompt système. Ce qu’il en advient dépend de qui gère ce serveur.</translation>
        </message>
        <message>
            <source>The way there is not encrypted: others in the network can read it.</source>
            <translation>Le trajet n’est pas chiffré : d’autres personnes sur le réseau peuvent lire.</translation>
        </message>
        <message>
            <source>Send this chat to {0}?</source>
            <translation>Envoyer cette discussion à {0} ?</translation>
        </message>
        <message>
            <source>Send it there</source>
            <translation>L’envoyer</translation>
        </message>
        <message>
            <source>A scratch chat is never stored: to print it, keep it first.</source>
            <translation>Une discussion temporaire n’est jamais enregistrée : pour l’imprimer, conservez-la d’abord.</translation>
        </message>
        <message>
            <source>Scratch chat: nothing of it is stored, and it is gone once it is closed.</source>
            <translation>Discussion temporaire : rien n’en est enregistré, et elle disparaît à la fermeture.</translation>
        </message>
        <message>
            <source>Undo  Ctrl+Z</source>
            <translation>Annuler  Ctrl+Z</translation>
        </message>
        <message>
            <source>The scratch chat is gone.</source>
            <translation>La discussion temporaire a disparu.</translation>
        </message>
        <message>
            <source>“{0}” was deleted.</source>
            <translation>« {0} » a été supprimé.</translation>
        </message>
        <message>
            <source>The model is loading{0}. You can write now; the answer follows.</source>
            <translation>Le modèle se charge{0}. Vous pouvez déjà écrire ; la réponse suivra.</translation>
        </message>
        <message>
            <source>No model is loaded. You can write now; the answer follows once one is loaded.</source>
            <translation>Aucun modèle n’est chargé. Vous pouvez déjà écrire ; la réponse suivra dès qu’il y en aura un.</translation>
        </message>
        <message>
            <source>{0} runs on this machine; nothing you write leaves it.</source>
            <translation>{0} s’exécute sur cette machine ; rien de ce que vous écrivez n’en sort.</translation>
        </message>
    </context>
    <context>
        <name>Column</name>
        <message>
            <source>First</source>
            <translation>Première</translation>
        </message>
        <message>
            <source>Second</source>
            <translation>Deuxième</translation>
        </message>
        <message>
            <source>{0}: model</source>
            <translation>{0} : modèle</translation>
        </message>
        <message>
            <source>{0}: sampling</source>
            <translation>{0} : échantillonnage</translation>
        </message>
        <message>
            <source>{0} answer</source>
            <translation>{0} réponse</translation>
        </message>
        <message>
            <source>Go on with this</source>
            <translation>Continuer avec celle-ci</translation>
        </message>
        <message>
            <source>Go on with the {0} answer</source>
            <translation>Continuer avec cette réponse : {0}</translation>
        </message>
    </context>
    <context>
        <name>Comparison</name>
        <message>
            <source>One model is open at a time on this PC: this answer comes second.</source>
            <translation>Un seul modèle à la fois est ouvert sur ce PC : cette réponse vient en second.</translation>
        </message>
        <message>
            <source>The model is loading; its answer follows.</source>
            <translation>Le modèle se charge ; sa réponse suivra.</translation>
        </message>
        <message>
            <source>The model was not loaded, so there is no answer from it.</source>
            <translation>Le modèle n’a pas été chargé : il n’y a pas de réponse de lui.</translation>
        </message>
    </context>
    <context>
        <name>Composer</name>
        <message>
            <source>Message Switchyard…</source>
            <translation>Message à Switchyard…</translation>
        </message>
        <message>
            <source>Message</source>
            <translation>Message</translation>
        </message>
        <message>
            <source>Enter sends, Shift+Enter starts a new line</source>
            <translation>Entrée envoie, Maj+Entrée commence une nouvelle ligne</translation>
        </message>
        <message>
            <source>Attach files or a folder</source>
            <translation>Joindre des fichiers ou un dossier</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>Prompt système</translation>
        </message>
        <message>
            <source>Instructions the model reads first</source>
            <translation>Instructions que le modèle lit en premier</translation>
        </message>
        <message>
            <source>The model may call tools in this chat</source>
            <translation>Le modèle peut appeler des outils dans cette discussion</translation>
        </message>
        <message>
            <source>Let the model call tools</source>
            <translation>Laisser le modèle appeler des outils</translation>
        </message>
        <message>
            <source>Sampling: {0}</source>
            <translation>Échantillonnage : {0}</translation>
        </message>
        <message>
            <source>How the next token is chosen: {0}</source>
            <translation>Comment le prochain token est choisi : {0}</translation>
        </message>
        <message>
            <source>Files…</source>
            <translation>Fichiers…</translation>
        </message>
        <message>
            <source>Folder…</source>
            <translation>Dossier…</translation>
        </message>
        <message>
            <source>System</source>
            <translation>Système</translation>
        </message>
        <message>
            <source>Stop  Esc</source>
            <translation>Stop  Échap</translation>
        </message>
        <message>
            <source>Send</source>
            <translation>Envoyer</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>Arrêter la réponse</translation>
        </message>
    </context>
    <context>
        <name>ComputingCard</name>
        <message>
            <source>Time it</source>
            <translation>Mesurer</translation>
        </message>
        <message>
            <source>Loads the model with these settings, has it write a little, and measures that</source>
            <translation>Charge le modèle avec ces réglages, le fait écrire un peu et mesure sa vitesse</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>Recharger le modèle</translation>
        </message>
        <message>
            <source>Changes apply at the next start, or now with these buttons.</source>
            <translation>Les changements prennent effet au prochain démarrage, ou tout de suite avec ces boutons.</translation>
        </message>
        <message>
            <source>Loading the model and timing it…</source>
            <translation>Chargement et mesure du modèle…</translation>
        </message>
        <message>
            <source>{0}: {1} tokens/s, measured just now</source>
            <translation>{0} : {1} tokens/s, mesuré à l’instant</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Modèle de départ</translation>
        </message>
        <message>
            <source>No graphics card computes here.</source>
            <translation>Aucune carte graphique ne calcule ici.</translation>
        </message>
        <message>
            <source>{0}: {1} tokens/s, measured</source>
            <translation>{0} : {1} tokens/s, mesuré</translation>
        </message>
        <message>
            <source>{0}: about {1} tokens/s, {2} to {3}</source>
            <translation>{0} : environ {1} tokens/s, {2} à {3}</translation>
        </message>
    </context>
    <context>
        <name>ContextMeter</name>
        <message>
            <source>Context</source>
            <translation>Contexte</translation>
        </message>
        <message>
            <source>Estimate, including your draft; the engine counts with the next answer.</source>
            <translation>Estimation, brouillon compris ; le moteur compte avec la prochaine réponse.</translation>
        </message>
        <message>
            <source>Counted by the engine after the last answer.</source>
            <translation>Compté par le moteur après la dernière réponse.</translation>
        </message>
        <message>
            <source>Click to see and change the length.</source>
            <translation>Cliquez pour voir et modifier la longueur.</translation>
        </message>
        <message>
            <source>context {0} of {1}</source>
            <translation>contexte {0} sur {1}</translation>
        </message>
        <message>
            <source>context about {0} of {1}</source>
            <translation>contexte environ {0} sur {1}</translation>
        </message>
        <message>
            <source>context filling up: {0} of {1}</source>
            <translation>contexte bientôt plein : {0} sur {1}</translation>
        </message>
        <message>
            <source>context filling up: about {0} of {1}</source>
            <translation>contexte bientôt plein : environ {0} sur {1}</translation>
        </message>
        <message>
            <source>context almost full: {0} of {1}</source>
            <translation>contexte presque plein : {0} sur {1}</translation>
        </message>
        <message>
            <source>context almost full: about {0} of {1}</source>
            <translation>contexte presque plein : environ {0} sur {1}</translation>
        </message>
        <message>
            <source>context exceeded: {0} of {1}</source>
            <translation>contexte dépassé : {0} sur {1}</translation>
        </message>
        <message>
            <source>context exceeded: about {0} of {1}</source>
            <translation>contexte dépassé : environ {0} sur {1}</translation>
        </message>
    </context>
    <context>
        <name>ContextPopover</name>
        <message>
            <source>Context</source>
            <translation>Contexte</translation>
        </message>
        <message>
            <source>Length of the context, in steps</source>
            <translation>Longueur du contexte, par paliers</translation>
        </message>
        <message>
            <source> tokens</source>
            <translation> tokens</translation>
        </message>
        <message>
            <source>Length of the context</source>
            <translation>Longueur du contexte</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>Recharger le modèle</translation>
        </message>
        <message>
            <source>Fold earlier turns into a summary</source>
            <translation>Résumer les échanges précédents</translation>
        </message>
        <message>
            <source>Leave out the oldest turns</source>
            <translation>Omettre les échanges les plus anciens</translation>
        </message>
        <message>
            <source>Length</source>
            <translation>Longueur</translation>
        </message>
        <message>
            <source>About {0} of {1} tokens are used ({2}).</source>
            <translation>Environ {0} tokens sur {1} sont occupés ({2}).</translation>
        </message>
        <message>
            <source>{0} of {1} tokens used ({2}).</source>
            <translation>{0} tokens sur {1} occupés ({2}).</translation>
        </message>
        <message>
            <source>There is no earlier answer to fold yet.</source>
            <translation>Il n’y a pas encore de réponse précédente à résumer.</translation>
        </message>
        <message>
            <source>The length is set by {0}.</source>
            <translation>La longueur est fixée par {0}.</translation>
        </message>
        <message>
            <source>Keys and values of {0} tokens take {1} of {2} ({3} each).</source>
            <translation>Les clés et valeurs de {0} tokens prennent {1} sur {2} ({3} chacun).</translation>
        </message>
        <message>
            <source>That is more than is free now ({0}).</source>
            <translation>C’est plus que ce qui est libre actuellement ({0}).</translation>
        </message>
        <message>
            <source>The model is loaded with {0} tokens: the change needs it loaded again.</source>
            <translation>Le modèle est chargé avec {0} tokens : il faut le recharger pour appliquer le changement.</translation>
        </message>
    </context>
    <context>
        <name>ConversationDelegate</name>
        <message>
            <source>New title</source>
            <translation>Nouveau titre</translation>
        </message>
    </context>
    <context>
        <name>ConversationPanel</name>
        <message>
            <source>Search chats</source>
            <translation>Rechercher</translation>
        </message>
        <message>
            <source>Folders, scratch chats, import and export</source>
            <translation>Dossiers, discussions temporaires, import et export</translation>
        </message>
        <message>
            <source>More for chats</source>
            <translation>Plus d’options</translation>
        </message>
        <message>
            <source>Chats</source>
            <translation>Discussions</translation>
        </message>
        <message>
            <source>No chat contains these words.</source>
            <translation>Aucune discussion ne contient ces mots.</translation>
        </message>
        <message>
            <source>Rename	F2</source>
            <translation>Renommer	F2</translation>
        </message>
        <message>
            <source>Close for good	Del</source>
            <translation>Fermer définitivement	Suppr</translation>
        </message>
        <message>
            <source>Unpin</source>
            <translation>Détacher</translation>
        </message>
        <message>
            <source>Pin to the top</source>
            <translation>Épingler en haut</translation>
        </message>
        <message>
            <source>Export…</source>
            <translation>Exporter…</translation>
        </message>
        <message>
            <source>Print…</source>
            <translation>Imprimer…</translation>
        </message>
        <message>
            <source>Delete	Del</source>
            <translation>Supprimer	Suppr</translation>
        </message>
        <message>
            <source>Move to folder</source>
            <translation>Déplacer vers un dossier</translation>
        </message>
        <message>
            <source>No folder</source>
            <translation>Aucun dossier</translation>
        </message>
        <message>
            <source>New folder…</source>
            <translation>Nouveau dossier…</translation>
        </message>
        <message>
            <source>Collapse</source>
            <translation>Replier</translation>
        </message>
        <message>
            <source>Expand</source>
            <translation>Déplier</translation>
        </message>
        <message>
            <source>Delete…	Del</source>
            <translation>Supprimer…	Suppr</translation>
        </message>
        <message>
            <source>New folder</source>
            <translation>Nouveau dossier</translation>
        </message>
        <message>
            <source>New scratch chat	Ctrl+Shift+N</source>
            <translation>Nouvelle discussion temporaire	Ctrl+Maj+N</translation>
        </message>
        <message>
            <source>Import chats…</source>
            <translation>Importer des discussions…</translation>
        </message>
        <message>
            <source>Export chat…</source>
            <translation>Exporter la discussion…</translation>
        </message>
        <message>
            <source>Print chat…</source>
            <translation>Imprimer la discussion…</translation>
        </message>
        <message>
            <source>Export all chats…</source>
            <translation>Exporter toutes les discussions…</translation>
        </message>
    </context>
    <context>
        <name>CopyButton</name>
        <message>
            <source>Copied</source>
            <translation>Copié</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>Copier</translation>
        </message>
        <message>
            <source>Copy code</source>
            <translation>Copier le code</translation>
        </message>
    </context>
    <context>
        <name>CoreGrid</name>
        <message>
            <source>{0} CPUs, {1}% busy on average; busiest: number {2} with {3}%</source>
            <translation>{0} processeurs, occupés à {1} % en moyenne ; le plus occupé : numéro {2} avec {3} %</translation>
        </message>
        <message>
            <source>CPU {0}: {1}% busy</source>
            <translation>Processeur {0} : occupé à {1} %</translation>
        </message>
    </context>
    <context>
        <name>DataCard</name>
        <message>
            <source>Data</source>
            <translation>Données</translation>
        </message>
        <message>
            <source>Open folder</source>
            <translation>Ouvrir le dossier</translation>
        </message>
        <message>
            <source>Change…</source>
            <translation>Modifier…</translation>
        </message>
        <message>
            <source>Data folder</source>
            <translation>Dossier de données</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>Folder for chats and models</source>
            <translation>Dossier des discussions et des modèles</translation>
        </message>
        <message>
            <source>Copy your chats and models to {0}?</source>
            <translation>Copier vos discussions et modèles vers {0} ?</translation>
        </message>
        <message>
            <source>They are copied at the next start. The current folder stays until you delete it.</source>
            <translation>Ils seront copiés au prochain démarrage. Le dossier actuel reste jusqu’à ce que vous le supprimiez.</translation>
        </message>
        <message>
            <source>Copy them</source>
            <translation>Les copier</translation>
        </message>
        <message>
            <source>Start empty</source>
            <translation>Commencer à vide</translation>
        </message>
        <message>
            <source>At the next start your chats and models are copied to {0}, which is then used.</source>
            <translation>Au prochain démarrage, vos discussions et modèles seront copiés vers {0}, qui sera alors utilisé.</translation>
        </message>
        <message>
            <source>The data in {0} is used from the next start.</source>
            <translation>Les données de {0} seront utilisées dès le prochain démarrage.</translation>
        </message>
    </context>
    <context>
        <name>DataFolder</name>
        <message>
            <source>{0} is inside the current data folder; choose a folder outside it.</source>
            <translation>{0} se trouve dans le dossier de données actuel ; choisissez un dossier en dehors.</translation>
        </message>
        <message>
            <source>{0} cannot be written to ({1}); choose another folder.</source>
            <translation>Impossible d’écrire dans {0} ({1}) ; choisissez un autre dossier.</translation>
        </message>
        <message>
            <source>The data could not be copied to {0} ({1}); {2} stays in use.</source>
            <translation>Les données n’ont pas pu être copiées vers {0} ({1}) ; {2} reste utilisé.</translation>
        </message>
        <message>
            <source>{0} has {1} free, but {2} are to be copied; {3} stays in use.</source>
            <translation>{0} a {1} de libre, mais il faut en copier {2} ; {3} reste utilisé.</translation>
        </message>
    </context>
    <context>
        <name>DataFolderStart</name>
        <message>
            <source>Copying chats and models to {0}…</source>
            <translation>Copie des discussions et modèles vers {0}…</translation>
        </message>
        <message>
            <source>Keep the current folder</source>
            <translation>Garder le dossier actuel</translation>
        </message>
        <message>
            <source>The data folder could not be changed.</source>
            <translation>Le dossier de données n’a pas pu être changé.</translation>
        </message>
        <message>
            <source>The data folder {0} is missing.</source>
            <translation>Le dossier de données {0} est introuvable.</translation>
        </message>
        <message>
            <source>Plug in its drive and try again, or continue with the default folder {0}.</source>
            <translation>Branchez son disque et réessayez, ou continuez avec le dossier par défaut {0}.</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>Réessayer</translation>
        </message>
        <message>
            <source>Use the default folder</source>
            <translation>Utiliser le dossier par défaut</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>Quitter</translation>
        </message>
        <message>
            <source>Switchyard is already open with the data folder {0}, but does not respond. End it, in the system's task manager if necessary, and start again.</source>
            <translation>Switchyard est déjà ouvert avec le dossier de données {0}, mais ne répond pas. Mettez-y fin, au besoin dans le gestionnaire des tâches, puis redémarrez.</translation>
        </message>
        <message>
            <source>The data folder {0} cannot be written to; check its permissions and free space, then start again.</source>
            <translation>Impossible d’écrire dans le dossier de données {0} ; vérifiez ses autorisations et l’espace libre, puis redémarrez.</translation>
        </message>
        <message>
            <source>{0} is not a file, and Switchyard keeps one there: move it away, then start again.</source>
            <translation>{0} n’est pas un fichier, alors que Switchyard en garde un à cet endroit : déplacez-le, puis redémarrez.</translation>
        </message>
    </context>
    <context>
        <name>Diagnosis</name>
        <message>
            <source>The report could not be written to {0}: choose another folder.</source>
            <translation>Le rapport n’a pas pu être écrit dans {0} : choisissez un autre dossier.</translation>
        </message>
    </context>
    <context>
        <name>Downloads</name>
        <message>
            <source>Downloads could not be started: reinstall Switchyard.</source>
            <translation>Les téléchargements n’ont pas pu démarrer : réinstallez Switchyard.</translation>
        </message>
        <message>
            <source>The downloads stopped and could not be started again; try Resume.</source>
            <translation>Les téléchargements se sont arrêtés et n’ont pas pu repartir ; essayez « Reprendre ».</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} sur {1}</translation>
        </message>
        <message>
            <source>connecting</source>
            <translation>connexion</translation>
        </message>
        <message>
            <source>{0} left</source>
            <translation>{0} restants</translation>
        </message>
        <message>
            <source>waits for its turn</source>
            <translation>attend son tour</translation>
        </message>
        <message>
            <source>paused</source>
            <translation>en pause</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>échec</translation>
        </message>
        <message>
            <source>done</source>
            <translation>terminé</translation>
        </message>
        <message>
            <source>{0} that are already here are deleted. To keep them, pause it instead.</source>
            <translation>{0} déjà téléchargés seront supprimés. Pour les garder, mettez plutôt en pause.</translation>
        </message>
        <message>
            <source>Cancel the download of {0}?</source>
            <translation>Annuler le téléchargement de {0} ?</translation>
        </message>
        <message>
            <source>Cancel the download</source>
            <translation>Annuler le téléchargement</translation>
        </message>
        <message>
            <source>Keep it</source>
            <translation>Le garder</translation>
        </message>
    </context>
    <context>
        <name>DownloadsCard</name>
        <message>
            <source>Downloads</source>
            <translation>Téléchargements</translation>
        </message>
        <message>
            <source>Speed limit</source>
            <translation>Limite de débit</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>au plus {0}</translation>
        </message>
        <message>
            <source>no speed limit</source>
            <translation>sans limite de débit</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>Pause</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>Reprendre</translation>
        </message>
        <message>
            <source>Access token…</source>
            <translation>Jeton d’accès…</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>Earlier (Alt+Up)</source>
            <translation>Plus tôt (Alt+Haut)</translation>
        </message>
        <message>
            <source>Later (Alt+Down)</source>
            <translation>Plus tard (Alt+Bas)</translation>
        </message>
    </context>
    <context>
        <name>DownloadsMark</name>
        <message>
            <source>Downloads</source>
            <translation>Téléchargements</translation>
        </message>
        <message>
            <source>1 download, {0}%</source>
            <translation>1 téléch., {0} %</translation>
        </message>
        <message numerus="yes">
            <source>{0} downloads, {1}%</source>
            <translation>
                <numerusform>{0} téléch., {1} %</numerusform>
                <numerusform>{0} téléch., {1} %</numerusform>
            </translation>
        </message>
        <message>
            <source>A download stopped</source>
            <translation>Un téléchargement s’est arrêté</translation>
        </message>
        <message>
            <source>{0}: show them</source>
            <translation>{0} : les afficher</translation>
        </message>
    </context>
    <context>
        <name>DownloadsView</name>
        <message>
            <source>Downloads</source>
            <translation>Téléchargements</translation>
        </message>
        <message>
            <source>Pause or resume the download</source>
            <translation>Suspendre ou reprendre le téléchargement</translation>
        </message>
        <message>
            <source>Download it earlier</source>
            <translation>Télécharger plus tôt</translation>
        </message>
        <message>
            <source>Download it later</source>
            <translation>Télécharger plus tard</translation>
        </message>
        <message>
            <source>Cancel the download</source>
            <translation>Annuler le téléchargement</translation>
        </message>
    </context>
    <context>
        <name>EmptyBatch</name>
        <message>
            <source>Every row is answered, many at a time. The result file keeps the input's columns.</source>
            <translation>Chaque ligne reçoit une réponse, beaucoup à la fois. Le fichier de résultat garde les colonnes d’origine.</translation>
        </message>
        <message>
            <source>Accepted: csv, tsv, jsonl, parquet, xlsx, txt, md, pdf, docx and html, a folder of such files, and OpenAI batch files.</source>
            <translation>Acceptés : csv, tsv, jsonl, parquet, xlsx, txt, md, pdf, docx et html, un dossier de tels fichiers, et les fichiers batch d’OpenAI.</translation>
        </message>
        <message>
            <source>Choose a file…</source>
            <translation>Choisir un fichier…</translation>
        </message>
        <message>
            <source>Choose a folder…</source>
            <translation>Choisir un dossier…</translation>
        </message>
        <message>
            <source>Drop a file of prompts here</source>
            <translation>Déposez ici un fichier de prompts</translation>
        </message>
    </context>
    <context>
        <name>EmptyChat</name>
        <message>
            <source>Ask something to begin</source>
            <translation>Posez une question pour commencer</translation>
        </message>
        <message>
            <source>Choose a model</source>
            <translation>Choisir un modèle</translation>
        </message>
        <message>
            <source>What is the capital of France? Answer in one sentence.</source>
            <translation>Quelle est la capitale de la France ? Réponds en une phrase.</translation>
        </message>
        <message>
            <source>Write one sentence about the sea.</source>
            <translation>Écris une phrase sur la mer.</translation>
        </message>
        <message>
            <source>Why should we drink water? Answer in one sentence.</source>
            <translation>Pourquoi faut-il boire de l’eau ? Réponds en une phrase.</translation>
        </message>
        <message>
            <source>Why do people like music? Answer in one sentence.</source>
            <translation>Pourquoi aime-t-on la musique ? Réponds en une phrase.</translation>
        </message>
    </context>
    <context>
        <name>Engine</name>
        <message>
            <source>The graphics card limits the speed: it is busy {0} of the time, reading at {1} GB/s.</source>
            <translation>La carte graphique limite la vitesse : elle est occupée {0} du temps et lit à {1} Go/s.</translation>
        </message>
        <message>
            <source>The CPU limits the speed.</source>
            <translation>Le processeur limite la vitesse.</translation>
        </message>
        <message>
            <source>Reading {0} from RAM limits the speed: the CPU is busy {1} of the time, at {2} GB/s.</source>
            <translation>La lecture en RAM limite la vitesse ({0}) : le processeur est occupé {1} du temps, à {2} Go/s.</translation>
        </message>
        <message>
            <source>The link to the card limits the speed: it is busy {0} of the time, at {1} GB/s.</source>
            <translation>La liaison avec la carte limite la vitesse : elle est occupée {0} du temps, à {1} Go/s.</translation>
        </message>
        <message>
            <source>CPU arithmetic limits the speed: the CPU is busy {0} of the time, and computing experts takes longer than reading them from RAM.</source>
            <translation>Le calcul du processeur limite la vitesse : il est occupé {0} du temps, et calculer les experts prend plus de temps que les lire en RAM.</translation>
        </message>
        <message>
            <source>Launching many small operations on the card limits the speed: {0} ms of the {1} ms per token.</source>
            <translation>Le lancement de nombreuses petites opérations sur la carte limite la vitesse : {0} ms des {1} ms par token.</translation>
        </message>
        <message>
            <source>Layers are read for each token: rows of a file share that, and gain most.</source>
            <translation>Des couches sont lues pour chaque token : les lignes d’un fichier partagent cette lecture et y gagnent le plus.</translation>
        </message>
        <message>
            <source>No single change of memory, link, disk or precision would make a noticeable difference.</source>
            <translation>Aucun changement isolé de mémoire, de liaison, de disque ou de précision n’apporterait de différence notable.</translation>
        </message>
        <message>
            <source>{0} would help most: {1} tokens/s, {2} times as fast with the prompt included.</source>
            <translation>Le plus utile serait : {0}. {1} tokens/s, {2} fois plus rapide, prompt compris.</translation>
        </message>
        <message>
            <source>{0} would help most: {1} tokens/s, about {2} times as fast.</source>
            <translation>Le plus utile serait : {0}. {1} tokens/s, environ {2} fois plus rapide.</translation>
        </message>
        <message>
            <source>{0} GB of RAM</source>
            <translation>{0} Go de RAM</translation>
        </message>
        <message>
            <source>A card with {0} GB</source>
            <translation>Une carte de {0} Go</translation>
        </message>
        <message>
            <source>A link to the card that is twice as fast</source>
            <translation>Une liaison deux fois plus rapide avec la carte</translation>
        </message>
        <message>
            <source>A disk that is twice as fast</source>
            <translation>Un disque deux fois plus rapide</translation>
        </message>
        <message>
            <source>RAM that is twice as fast</source>
            <translation>Une RAM deux fois plus rapide</translation>
        </message>
        <message>
            <source>All {0} threads</source>
            <translation>Les {0} threads</translation>
        </message>
        <message>
            <source>expert weights</source>
            <translation>poids des experts</translation>
        </message>
        <message>
            <source>as stored ({0}-bit)</source>
            <translation>comme dans le fichier ({0} bits)</translation>
        </message>
        <message>
            <source>as stored ({0}-bit and {1}-bit)</source>
            <translation>comme dans le fichier ({0} et {1} bits)</translation>
        </message>
        <message>
            <source>as stored ({0}-bit, {1}-bit and {2}-bit)</source>
            <translation>comme dans le fichier ({0}, {1} et {2} bits)</translation>
        </message>
        <message>
            <source>Switchyard mixed</source>
            <translation>Switchyard mixte</translation>
        </message>
        <message>
            <source>Switchyard mixed, static</source>
            <translation>Switchyard mixte, fixe</translation>
        </message>
        <message>
            <source>Switchyard mixed, predicted</source>
            <translation>Switchyard mixte, avec prédiction</translation>
        </message>
        <message>
            <source>Switchyard, misses on the CPU</source>
            <translation>Switchyard, experts absents sur le CPU</translation>
        </message>
        <message>
            <source>CPU only</source>
            <translation>CPU seul</translation>
        </message>
        <message>
            <source>CPU experts</source>
            <translation>experts sur le CPU</translation>
        </message>
        <message>
            <source>on-demand</source>
            <translation>à la demande</translation>
        </message>
        <message>
            <source>whole-layer prefetch</source>
            <translation>couches entières à l’avance</translation>
        </message>
        <message>
            <source>the other weights and the KV cache</source>
            <translation>les autres poids et le cache KV</translation>
        </message>
        <message>
            <source>the weights and the KV cache</source>
            <translation>les poids et le cache KV</translation>
        </message>
        <message>
            <source>From now on: {0}, {1} tokens/s.</source>
            <translation>Désormais : {0}, {1} tokens/s.</translation>
        </message>
        <message>
            <source>Before: {0} tokens/s, so {1} times.</source>
            <translation>Auparavant : {0} tokens/s, soit {1} fois plus rapide.</translation>
        </message>
        <message>
            <source>Before, it could not run.</source>
            <translation>Auparavant, cela ne pouvait pas fonctionner.</translation>
        </message>
        <message>
            <source>The settings stay the same: {0} tokens/s, and nothing else is better.</source>
            <translation>Les réglages restent les mêmes : {0} tokens/s, et rien d’autre n’est meilleur.</translation>
        </message>
        <message>
            <source>{0} did not answer within {1} seconds.</source>
            <translation>{0} n’a pas répondu en {1} secondes.</translation>
        </message>
        <message>
            <source>{0} did not speak MCP within {1} seconds of its start: check its command or address.</source>
            <translation>{0} n’a pas parlé MCP dans les {1} secondes après son démarrage : vérifiez sa commande ou son adresse.</translation>
        </message>
        <message>
            <source>{0} ended in the middle of it.</source>
            <translation>{0} s’est arrêté en plein milieu.</translation>
        </message>
        <message>
            <source>{0} sent more than {1} MB at once, and was stopped.</source>
            <translation>{0} a envoyé plus de {1} Mo d’un coup et a été arrêté.</translation>
        </message>
        <message>
            <source>{0} could not be started ({1}): check its command.</source>
            <translation>{0} n’a pas pu être démarré ({1}) : vérifiez sa commande.</translation>
        </message>
        <message>
            <source>{0} ended, or does not speak MCP.</source>
            <translation>{0} s’est arrêté, ou ne parle pas MCP.</translation>
        </message>
        <message>
            <source>{0} ended, or does not speak MCP. It wrote: {1}</source>
            <translation>{0} s’est arrêté, ou ne parle pas MCP. Il a écrit : {1}</translation>
        </message>
        <message>
            <source>Give the server a name.</source>
            <translation>Donnez un nom au serveur.</translation>
        </message>
        <message>
            <source>{0} needs either a command or an address: enter one of them.</source>
            <translation>{0} a besoin d’une commande ou d’une adresse : indiquez l’une des deux.</translation>
        </message>
        <message>
            <source>This is not JSON ({0}): paste the whole block.</source>
            <translation>Ce n’est pas du JSON ({0}) : collez le bloc entier.</translation>
        </message>
        <message>
            <source>The user did not allow this call.</source>
            <translation>Cet appel n’a pas été autorisé.</translation>
        </message>
        <message>
            <source>There is no tool of this name.</source>
            <translation>Il n’y a pas d’outil de ce nom.</translation>
        </message>
        <message>
            <source>The expression divides by zero.</source>
            <translation>L’expression divise par zéro.</translation>
        </message>
        <message>
            <source>No folder is attached to this chat: attach one first.</source>
            <translation>Aucun dossier n’est joint à cette discussion : joignez-en un d’abord.</translation>
        </message>
        <message>
            <source>{0} was removed or is off.</source>
            <translation>{0} a été supprimé ou est désactivé.</translation>
        </message>
        <message>
            <source>The process with the tools ended.</source>
            <translation>Le processus des outils s’est terminé.</translation>
        </message>
        <message>
            <source>The process with the tools could not be started.</source>
            <translation>Le processus des outils n’a pas pu démarrer.</translation>
        </message>
        <message>
            <source>The tools did not respond, and were stopped.</source>
            <translation>Les outils ne répondaient plus et ont été arrêtés.</translation>
        </message>
        <message>
            <source>The call was stopped.</source>
            <translation>L’appel a été arrêté.</translation>
        </message>
        <message>
            <source>The arguments are no JSON object.</source>
            <translation>Les arguments ne sont pas un objet JSON.</translation>
        </message>
        <message>
            <source>{0} was called with the same arguments {1} times: no more calls, answer now.</source>
            <translation>{0} a été appelé {1} fois avec les mêmes arguments : plus d’appels, répondre maintenant.</translation>
        </message>
        <message>
            <source>Tools were called {0} times in a row: no more calls, answer now.</source>
            <translation>Des outils ont été appelés {0} fois de suite : plus d’appels, répondre maintenant.</translation>
        </message>
        <message>
            <source>More than {0} tools were called at once: no more calls, answer now.</source>
            <translation>Plus de {0} outils ont été appelés à la fois : plus d’appels, répondre maintenant.</translation>
        </message>
        <message>
            <source>{0} has no command and no address: enter one of them.</source>
            <translation>{0} n’a ni commande ni adresse : indiquez l’une des deux.</translation>
        </message>
        <message>
            <source>The address of {0} does not begin with http:// or https://: correct it.</source>
            <translation>L’adresse de {0} ne commence pas par http:// ou https:// : corrigez-la.</translation>
        </message>
        <message>
            <source>The arguments of {0} are not a list of texts: correct them.</source>
            <translation>Les arguments de {0} ne sont pas une liste de textes : corrigez-les.</translation>
        </message>
        <message>
            <source>The command of {0} has a character that no command can have: correct it.</source>
            <translation>La commande de {0} contient un caractère qu’aucune commande ne peut avoir : corrigez-la.</translation>
        </message>
        <message>
            <source>The variables or headers of {0} are not names with texts: correct them.</source>
            <translation>Les variables ou en-têtes de {0} ne sont pas des noms avec des textes : corrigez-les.</translation>
        </message>
        <message>
            <source>No servers are in it: it needs "mcpServers" with a name for each.</source>
            <translation>Il ne contient aucun serveur : il faut « mcpServers » avec un nom pour chacun.</translation>
        </message>
        <message>
            <source>{0} servers are too many: up to {1} can be added.</source>
            <translation>{0} serveurs, c’est trop : on peut en ajouter jusqu’à {1}.</translation>
        </message>
        <message>
            <source>{0} needs its {1} again, which was kept for one run only: edit the server.</source>
            <translation>{0} a de nouveau besoin de {1}, gardé jusqu’à la fermeture seulement : modifiez le serveur.</translation>
        </message>
        <message>
            <source>{0} needs {1} in the environment, where it is not set: set it.</source>
            <translation>{0} a besoin de {1} dans l’environnement, où elle n’est pas définie : définissez-la.</translation>
        </message>
        <message>
            <source>No documents are attached to this chat.</source>
            <translation>Aucun document n’est joint à cette discussion.</translation>
        </message>
        <message>
            <source>There is no tool named {0}.</source>
            <translation>Il n’y a pas d’outil nommé {0}.</translation>
        </message>
        <message>
            <source>A batch has a prompt and 1 to {0} rows.</source>
            <translation>Un lot a un prompt et de 1 à {0} lignes.</translation>
        </message>
        <message>
            <source>The rows cannot be written to {0} ({1}).</source>
            <translation>Les lignes ne peuvent pas être écrites dans {0} ({1}).</translation>
        </message>
        <message>
            <source>The file {0} cannot be read ({1}).</source>
            <translation>Le fichier {0} ne peut pas être lu ({1}).</translation>
        </message>
        <message>
            <source>The file {0} is no text.</source>
            <translation>Le fichier {0} n’est pas du texte.</translation>
        </message>
        <message>
            <source>No attached folder has a file {0}.</source>
            <translation>Aucun dossier joint ne contient de fichier {0}.</translation>
        </message>
        <message>
            <source>The result has too many digits.</source>
            <translation>Le résultat a trop de chiffres.</translation>
        </message>
        <message>
            <source>The result is no real number.</source>
            <translation>Le résultat n’est pas un nombre réel.</translation>
        </message>
        <message>
            <source>A factorial is of a whole number from 0 to 1000.</source>
            <translation>Une factorielle porte sur un nombre entier de 0 à 1000.</translation>
        </message>
        <message>
            <source>An expression has 1 to {0} characters.</source>
            <translation>Une expression a de 1 à {0} caractères.</translation>
        </message>
        <message>
            <source>The expression cannot be read ({0}).</source>
            <translation>L’expression est illisible ({0}).</translation>
        </message>
        <message>
            <source>The expression cannot be computed ({0}).</source>
            <translation>L’expression ne peut pas être calculée ({0}).</translation>
        </message>
        <message>
            <source>Only numbers, + - * / // % **, and functions such as sqrt, log, sin and round are computed.</source>
            <translation>Seuls les nombres, + - * / // % ** et des fonctions comme sqrt, log, sin et round sont calculés.</translation>
        </message>
        <message>
            <source>The starter model is not on this machine yet.</source>
            <translation>Le modèle de départ n’est pas encore sur cette machine.</translation>
        </message>
        <message>
            <source>There is no file {0}: check the path.</source>
            <translation>Il n’y a pas de fichier {0} : vérifiez le chemin.</translation>
        </message>
        <message>
            <source>There is no folder {0}: check the path.</source>
            <translation>Il n’y a pas de dossier {0} : vérifiez le chemin.</translation>
        </message>
        <message>
            <source>There is no model at {0}: check the path.</source>
            <translation>Il n’y a pas de modèle dans {0} : vérifiez le chemin.</translation>
        </message>
        <message>
            <source>{0} is not a folder: check the path.</source>
            <translation>{0} n’est pas un dossier : vérifiez le chemin.</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}): check the path.</source>
            <translation>{0} ne peut pas être lu ({1}) : vérifiez le chemin.</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}): download or copy the model again.</source>
            <translation>{0} ne peut pas être lu ({1}) : téléchargez ou copiez de nouveau le modèle.</translation>
        </message>
        <message>
            <source>{0} has no {1}, so it is not a complete model: download or copy it again.</source>
            <translation>{0} n’a pas {1}, ce n’est donc pas un modèle complet : téléchargez-le ou copiez-le de nouveau.</translation>
        </message>
        <message>
            <source>{0} is a pickle file, which can run code when opened, so Switchyard never loads one: use the model's safetensors version.</source>
            <translation>{0} est un fichier pickle, qui peut exécuter du code à l’ouverture ; Switchyard n’en charge jamais : utilisez la version safetensors du modèle.</translation>
        </message>
        <message>
            <source>{0} is in use: unload it in Switchyard's window, end other programs with it, and try again.</source>
            <translation>{0} est utilisé : déchargez-le dans la fenêtre de Switchyard, fermez les autres programmes qui s’en servent et réessayez.</translation>
        </message>
        <message>
            <source>{0} is being moved or removed: wait until that is done.</source>
            <translation>{0} est en cours de déplacement ou de suppression : attendez la fin.</translation>
        </message>
        <message>
            <source>{0} exists already: choose another name.</source>
            <translation>{0} existe déjà : choisissez un autre nom.</translation>
        </message>
        <message>
            <source>{0} is already in the library.</source>
            <translation>{0} est déjà dans la bibliothèque.</translation>
        </message>
        <message>
            <source>The model folder {0} is not there: connect its disk, or take the folder off the list.</source>
            <translation>Le dossier de modèles {0} est absent : branchez son disque ou retirez le dossier de la liste.</translation>
        </message>
        <message>
            <source>The disk of {0} is full: make room and try again.</source>
            <translation>Le disque de {0} est plein : faites de la place et réessayez.</translation>
        </message>
        <message>
            <source>The disk of {0} is full: make room and let the download go on; nothing is lost.</source>
            <translation>Le disque de {0} est plein : faites de la place et reprenez le téléchargement ; rien n’est perdu.</translation>
        </message>
        <message>
            <source>The disk of {0} is full: free some space, and the job continues.</source>
            <translation>Le disque de {0} est plein : libérez de l’espace et la tâche continue.</translation>
        </message>
        <message>
            <source>Cannot read or write {0} ({1}): check its permissions and the disk.</source>
            <translation>Impossible de lire ou d’écrire {0} ({1}) : vérifiez les autorisations et le disque.</translation>
        </message>
        <message>
            <source>{0} needs {1} of RAM{2}, but only {3} are free: close other programs or choose a smaller model.</source>
            <translation>{0} a besoin de {1} de RAM{2}, mais seulement {3} sont libres : fermez d’autres programmes ou choisissez un modèle plus petit.</translation>
        </message>
        <message>
            <source>{0} needs {1} of RAM{2}, more than the {3} that the RAM budget allows: raise the budget or choose a smaller model.</source>
            <translation>{0} a besoin de {1} de RAM{2}, plus que les {3} autorisés par le budget de RAM : augmentez-le ou choisissez un modèle plus petit.</translation>
        </message>
        <message>
            <source>{0} ran out of memory: close other programs, or allow the model less memory or a shorter context.</source>
            <translation>{0} n’a plus de mémoire : fermez d’autres programmes, ou accordez au modèle moins de mémoire ou un contexte plus court.</translation>
        </message>
        <message>
            <source>{0} has no graphics card: choose one first.</source>
            <translation>{0} n’a pas de carte graphique : choisissez-en une d’abord.</translation>
        </message>
        <message>
            <source>The graphics card stopped responding, so the model runs on the CPU now.</source>
            <translation>La carte graphique ne répond plus, le modèle s’exécute donc maintenant sur le processeur.</translation>
        </message>
        <message>
            <source>The NVIDIA driver does not respond: restart the computer, or update the driver.</source>
            <translation>Le pilote NVIDIA ne répond pas : redémarrez l’ordinateur ou mettez le pilote à jour.</translation>
        </message>
        <message>
            <source>No NVIDIA driver was found.</source>
            <translation>Aucun pilote NVIDIA n’a été trouvé.</translation>
        </message>
        <message>
            <source>The {0} was {1} and is now {2}.</source>
            <translation>Ce qui a changé : {0}, auparavant {1}, maintenant {2}.</translation>
        </message>
        <message>
            <source>The prompt is {0} tokens long, but this model holds {1} together with the answer: shorten it by {2} tokens, or start a new chat.</source>
            <translation>Le prompt fait {0} tokens, mais ce modèle en contient {1}, réponse comprise : raccourcissez-le de {2} tokens ou commencez une nouvelle discussion.</translation>
        </message>
        <message>
            <source>No model is loaded: choose one first.</source>
            <translation>Aucun modèle n’est chargé : choisissez-en un d’abord.</translation>
        </message>
        <message>
            <source>There was not enough memory to choose this answer's next token: close other programs and ask again.</source>
            <translation>La mémoire n’a pas suffi pour choisir le prochain token de cette réponse : fermez d’autres programmes et redemandez.</translation>
        </message>
        <message>
            <source>Could not read {0} from {1} ({2}): check the network; models on this PC still work.</source>
            <translation>Impossible de lire {0} depuis {1} ({2}) : vérifiez le réseau ; les modèles de ce PC fonctionnent toujours.</translation>
        </message>
        <message>
            <source>{0} cannot be reached: waiting for the network.</source>
            <translation>{0} est injoignable : en attente du réseau.</translation>
        </message>
        <message>
            <source>The connection to {0} broke: trying again.</source>
            <translation>La connexion à {0} s’est interrompue : nouvel essai.</translation>
        </message>
        <message>
            <source>{0} sends nothing: waiting.</source>
            <translation>{0} n’envoie rien : en attente.</translation>
        </message>
        <message>
            <source>{0} gives {1} only to those it knows: enter an access token of an account that may read it.</source>
            <translation>{0} ne donne {1} qu’aux personnes connues : saisissez le jeton d’accès d’un compte autorisé à le lire.</translation>
        </message>
        <message>
            <source>{0} got too many requests from here: try again {1}.</source>
            <translation>{0} a reçu trop de requêtes d’ici : réessayez plus tard ({1}).</translation>
        </message>
        <message>
            <source>{0} gave no answer ({1}): check that the server runs, and the network.</source>
            <translation>{0} n’a pas répondu ({1}) : vérifiez que le serveur fonctionne, ainsi que le réseau.</translation>
        </message>
        <message>
            <source>There is no server with OpenAI's interface at {0} ({1}): check the address.</source>
            <translation>Il n’y a pas de serveur avec l’interface d’OpenAI à {0} ({1}) : vérifiez l’adresse.</translation>
        </message>
        <message>
            <source>{0} is not an address of a server: it must begin with http:// or https://.</source>
            <translation>{0} n’est pas l’adresse d’un serveur : elle doit commencer par http:// ou https://.</translation>
        </message>
        <message>
            <source>{0} is not an address: enter one such as http://10.0.0.5:8000/v1.</source>
            <translation>{0} n’est pas une adresse : saisissez-en une comme http://10.0.0.5:8000/v1.</translation>
        </message>
        <message>
            <source>There is an endpoint called {0} already, or nearly so: choose another name.</source>
            <translation>Il existe déjà un serveur nommé {0}, ou presque : choisissez un autre nom.</translation>
        </message>
        <message>
            <source>This is not a key: copy it again, in one piece and without spaces.</source>
            <translation>Ce n’est pas une clé : copiez-la de nouveau, d’un seul tenant et sans espaces.</translation>
        </message>
        <message>
            <source>This is not a token: copy it again from the hub's settings page, in one piece.</source>
            <translation>Ce n’est pas un jeton : copiez-le de nouveau depuis la page des paramètres du hub, d’un seul tenant.</translation>
        </message>
        <message>
            <source>This file holds no certificate in PEM.</source>
            <translation>Ce fichier ne contient pas de certificat PEM.</translation>
        </message>
        <message>
            <source>{0} has no rows: there is nothing to answer.</source>
            <translation>{0} n’a pas de lignes : il n’y a rien à traiter.</translation>
        </message>
        <message>
            <source>{0} cannot be written ({1}): choose another output.</source>
            <translation>{0} ne peut pas être écrit ({1}) : choisissez une autre sortie.</translation>
        </message>
        <message>
            <source>{0} is within the input: choose another output.</source>
            <translation>{0} se trouve dans l’entrée : choisissez une autre sortie.</translation>
        </message>
        <message>
            <source>{0} is protected by a password or is an old .xls: save it as .xlsx without a password.</source>
            <translation>{0} est protégé par un mot de passe ou est un ancien .xls : enregistrez-le en .xlsx sans mot de passe.</translation>
        </message>
        <message>
            <source>Another run is working on the job of {0}: wait for it or stop it first.</source>
            <translation>Une autre exécution traite la tâche de {0} : attendez-la ou arrêtez-la d’abord.</translation>
        </message>
        <message>
            <source>{0} was stopped.</source>
            <translation>{0} a été arrêté.</translation>
        </message>
        <message>
            <source>{0} failed: {1}.</source>
            <translation>{0} a échoué : {1}.</translation>
        </message>
    </context>
    <context>
        <name>EngineCard</name>
        <message>
            <source>First, the engine</source>
            <translation>D’abord, le moteur</translation>
        </message>
        <message>
            <source>Progress of the engine</source>
            <translation>Progression du moteur</translation>
        </message>
        <message>
            <source>Get the engine and the starter</source>
            <translation>Obtenir le moteur et le modèle de départ</translation>
        </message>
        <message>
            <source>Engine only</source>
            <translation>Moteur seulement</translation>
        </message>
        <message>
            <source>Resume</source>
            <translation>Reprendre</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>Réessayer</translation>
        </message>
        <message>
            <source>Pause</source>
            <translation>Pause</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>Use a file…</source>
            <translation>Utiliser un fichier…</translation>
        </message>
        <message>
            <source>For a computer without a network: files that another computer has fetched</source>
            <translation>Pour un ordinateur sans réseau : fichiers téléchargés par un autre ordinateur</translation>
        </message>
        <message>
            <source>Mirror and proxy…</source>
            <translation>Miroir et proxy…</translation>
        </message>
        <message>
            <source>The engine's files (*.zip *.whl)</source>
            <translation>Les fichiers du moteur (*.zip *.whl)</translation>
        </message>
        <message>
            <source>The engine's files</source>
            <translation>Les fichiers du moteur</translation>
        </message>
    </context>
    <context>
        <name>EngineClient</name>
        <message>
            <source>The engine was restarted before this request was done.</source>
            <translation>Le moteur a été redémarré avant la fin de cette requête.</translation>
        </message>
        <message>
            <source>The engine is not running; start it first.</source>
            <translation>Le moteur n’est pas en marche ; démarrez-le d’abord.</translation>
        </message>
        <message>
            <source>The engine uses protocol version {0} and this window version {1}: two installations are mixed, so reinstall Switchyard.</source>
            <translation>Le moteur utilise la version {0} du protocole et cette fenêtre la version {1} : deux installations sont mélangées, réinstallez Switchyard.</translation>
        </message>
        <message>
            <source>The engine was stopped before this request was done.</source>
            <translation>Le moteur a été arrêté avant la fin de cette requête.</translation>
        </message>
        <message>
            <source>The engine has not responded for {0} seconds: wait, or restart it.</source>
            <translation>Le moteur ne répond pas depuis {0} secondes : patientez, ou redémarrez-le.</translation>
        </message>
        <message>
            <source>A file of {0} became shorter, or its disk failed, while it was in use. Put the whole file back, then restart the engine.</source>
            <translation>Un fichier de {0} a été raccourci, ou son disque est tombé en panne, pendant son utilisation. Remettez le fichier complet en place, puis redémarrez le moteur.</translation>
        </message>
        <message>
            <source>The engine exited unexpectedly (code {0}); see its log for details.</source>
            <translation>Le moteur s’est arrêté de façon inattendue (code {0}) ; voir son journal pour les détails.</translation>
        </message>
        <message>
            <source>The engine crashed (status {0}).</source>
            <translation>Le moteur a planté (statut {0}).</translation>
        </message>
        <message>
            <source>The engine was killed (signal 9), perhaps for lack of memory.</source>
            <translation>Le moteur a été tué par le système (signal 9), peut-être faute de mémoire.</translation>
        </message>
        <message>
            <source>The engine crashed (signal 4): this processor lacks an instruction that it used.</source>
            <translation>Le moteur a planté (signal 4) : il manque à ce processeur une instruction utilisée.</translation>
        </message>
        <message>
            <source>The engine crashed (signal {0}: {1}).</source>
            <translation>Le moteur a planté (signal {0} : {1}).</translation>
        </message>
    </context>
    <context>
        <name>EnginePart</name>
        <message>
            <source>The installation was stopped. Nothing is lost: try again.</source>
            <translation>L’installation a été interrompue. Rien n’est perdu : réessayez.</translation>
        </message>
    </context>
    <context>
        <name>ExpertCard</name>
        <message>
            <source>Expert map</source>
            <translation>Carte des experts</translation>
        </message>
        <message>
            <source>A model like this has many small parts in each layer, called experts, and every token uses only a few of them. Each square is one expert: the stronger its colour, the more it is used; its pattern shows where it is stored.</source>
            <translation>Un tel modèle a dans chaque couche beaucoup de petites parties, appelées experts, et chaque token n’en utilise que quelques-unes. Chaque carré est un expert : plus sa couleur est vive, plus il est utilisé ; son motif montre où il se trouve.</translation>
        </message>
        <message>
            <source>By use</source>
            <translation>Par usage</translation>
        </message>
        <message>
            <source>Sort each layer's experts by use instead of by number</source>
            <translation>Trier les experts de chaque couche par usage plutôt que par numéro</translation>
        </message>
        <message>
            <source>Table</source>
            <translation>Tableau</translation>
        </message>
        <message>
            <source>The same experts as numbers, sorted by any column</source>
            <translation>Les mêmes experts en chiffres, triables par colonne</translation>
        </message>
        <message>
            <source>Show the experts as a table</source>
            <translation>Afficher les experts sous forme de tableau</translation>
        </message>
        <message>
            <source>Time in the recorded session</source>
            <translation>Moment de la session enregistrée</translation>
        </message>
        <message>
            <source>Scrubs through the session's maps</source>
            <translation>Parcourt les cartes de la session</translation>
        </message>
        <message>
            <source>Load a model with experts and ask something: each square is an expert.</source>
            <translation>Chargez un modèle à experts et posez une question : chaque carré est un expert.</translation>
        </message>
        <message>
            <source>{0} × {1}</source>
            <translation>{0} × {1}</translation>
        </message>
        <message>
            <source>{0} layers with {1} experts each</source>
            <translation>{0} couches de {1} experts chacune</translation>
        </message>
        <message>
            <source>Experts as a table</source>
            <translation>Experts en tableau</translation>
        </message>
    </context>
    <context>
        <name>ExpertMap</name>
        <message>
            <source>in VRAM</source>
            <translation>en VRAM</translation>
        </message>
        <message>
            <source>fetching</source>
            <translation>en transfert</translation>
        </message>
        <message>
            <source>in RAM</source>
            <translation>en RAM</translation>
        </message>
        <message>
            <source>on disk</source>
            <translation>sur le disque</translation>
        </message>
    </context>
    <context>
        <name>ExpertMapView</name>
        <message>
            <source>Expert map</source>
            <translation>Carte des experts</translation>
        </message>
        <message>
            <source>Layers by experts. Arrow keys move from expert to expert.</source>
            <translation>Couches par experts. Les flèches vont d’un expert à l’autre.</translation>
        </message>
        <message>
            <source>Layer {0}, expert {1}</source>
            <translation>Couche {0}, expert {1}</translation>
        </message>
        <message>
            <source>used {0} times</source>
            <translation>utilisé {0} fois</translation>
        </message>
        <message>
            <source>hit {0}%</source>
            <translation>succès {0} %</translation>
        </message>
        <message>
            <source>never used</source>
            <translation>jamais utilisé</translation>
        </message>
        <message>
            <source>last {0} steps ago</source>
            <translation>dernier usage il y a {0} étapes</translation>
        </message>
    </context>
    <context>
        <name>ExpertTable</name>
        <message>
            <source>Layer</source>
            <translation>Couche</translation>
        </message>
        <message>
            <source>Expert</source>
            <translation>Expert</translation>
        </message>
        <message>
            <source>Uses</source>
            <translation>Usages</translation>
        </message>
        <message>
            <source>Hits</source>
            <translation>Succès</translation>
        </message>
        <message>
            <source>Steps ago</source>
            <translation>Il y a (étapes)</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>Taille</translation>
        </message>
        <message>
            <source>Where</source>
            <translation>Où</translation>
        </message>
    </context>
    <context>
        <name>ExportButton</name>
        <message>
            <source>Export</source>
            <translation>Exporter</translation>
        </message>
        <message>
            <source>Contains no text of prompts or answers</source>
            <translation>Ne contient aucun texte de prompts ou de réponses</translation>
        </message>
        <message>
            <source>Trace for Perfetto and Chrome (JSON)…</source>
            <translation>Trace pour Perfetto et Chrome (JSON)…</translation>
        </message>
        <message>
            <source>Tables of spans and steps (CSV)…</source>
            <translation>Tableaux des segments et étapes (CSV)…</translation>
        </message>
        <message>
            <source>Picture (PNG)…</source>
            <translation>Image (PNG)…</translation>
        </message>
        <message>
            <source>Drawing (SVG)…</source>
            <translation>Dessin (SVG)…</translation>
        </message>
        <message>
            <source>Nothing to export yet: ask something in Chat first.</source>
            <translation>Rien à exporter pour l’instant : posez d’abord une question dans Discussion.</translation>
        </message>
        <message>
            <source>{0} spans written to {1}</source>
            <translation>{0} segments écrits dans {1}</translation>
        </message>
        <message>
            <source>Written to {0}</source>
            <translation>Enregistré dans {0}</translation>
        </message>
        <message>
            <source>{0} could not be written; choose another folder.</source>
            <translation>{0} n’a pas pu être écrit ; choisissez un autre dossier.</translation>
        </message>
        <message>
            <source>{0} could not be written ({1}); choose another folder.</source>
            <translation>{0} n’a pas pu être écrit ({1}) ; choisissez un autre dossier.</translation>
        </message>
    </context>
    <context>
        <name>FindBar</name>
        <message>
            <source>Find in this chat</source>
            <translation>Rechercher dans cette discussion</translation>
        </message>
        <message>
            <source>Previous match  Shift+F3</source>
            <translation>Résultat précédent  Maj+F3</translation>
        </message>
        <message>
            <source>Next match  F3</source>
            <translation>Résultat suivant  F3</translation>
        </message>
        <message>
            <source>Close  Esc</source>
            <translation>Fermer  Échap</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} sur {1}</translation>
        </message>
        <message>
            <source>looking…</source>
            <translation>recherche…</translation>
        </message>
        <message>
            <source>not in this chat</source>
            <translation>pas dans cette discussion</translation>
        </message>
    </context>
    <context>
        <name>FirstRun</name>
        <message>
            <source>{0} with {1}</source>
            <translation>{0} avec {1}</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1 cœur</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0} cœur</numerusform>
                <numerusform>{0} cœurs</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} of RAM, {1}</source>
            <translation>{0} de RAM, {1}</translation>
        </message>
        <message>
            <source>{0} free on the disk for models</source>
            <translation>{0} libres sur le disque pour les modèles</translation>
        </message>
        <message>
            <source>Models of up to about {0} run from memory; parts of larger ones are read from the disk as they answer, which takes longer.</source>
            <translation>Les modèles jusqu’à environ {0} s’exécutent en mémoire ; pour les plus grands, des parties sont lues sur le disque pendant la réponse, ce qui est plus long.</translation>
        </message>
        <message>
            <source>This processor has no AVX2: everything works, but takes several times as long.</source>
            <translation>Ce processeur n’a pas AVX2 : tout fonctionne, mais prend plusieurs fois plus de temps.</translation>
        </message>
        <message>
            <source>Graphics card and processor share the work.</source>
            <translation>La carte graphique et le processeur se partagent le travail.</translation>
        </message>
        <message>
            <source>The graphics card cannot be used here: the processor does the work.</source>
            <translation>La carte graphique n’est pas utilisable ici : le processeur fait le travail.</translation>
        </message>
        <message>
            <source>There is no graphics card for models: the processor does the work.</source>
            <translation>Il n’y a pas de carte graphique pour les modèles : le processeur fait le travail.</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>Examen de ce PC…</translation>
        </message>
        <message>
            <source>no graphics card that PyTorch can use</source>
            <translation>aucune carte graphique utilisable par PyTorch</translation>
        </message>
        <message>
            <source>Found: {0}. Everything is here already, and is prepared for this version.</source>
            <translation>Trouvé : {0}. Tout est déjà là, et est préparé pour cette version.</translation>
        </message>
        <message>
            <source>It is fetched once: {0}, about {1} on the disk when it is unpacked.</source>
            <translation>Téléchargé une seule fois : {0}, environ {1} sur le disque une fois décompressé.</translation>
        </message>
        <message>
            <source>The engine with PyTorch for {0} suits this PC.</source>
            <translation>Le moteur avec PyTorch pour {0} convient à ce PC.</translation>
        </message>
        <message>
            <source>Found: {0}. The engine comes with PyTorch for {1}.</source>
            <translation>Trouvé : {0}. Le moteur est fourni avec PyTorch pour {1}.</translation>
        </message>
        <message>
            <source>Checking what was fetched…</source>
            <translation>Vérification du téléchargement…</translation>
        </message>
        <message>
            <source>Unpacking…</source>
            <translation>Décompression…</translation>
        </message>
        <message>
            <source>Testing it on this PC…</source>
            <translation>Test sur ce PC…</translation>
        </message>
        <message>
            <source>Finishing…</source>
            <translation>Finalisation…</translation>
        </message>
        <message>
            <source>Installing…</source>
            <translation>Installation…</translation>
        </message>
    </context>
    <context>
        <name>FirstRunPage</name>
        <message>
            <source>This PC</source>
            <translation>Ce PC</translation>
        </message>
        <message>
            <source>Recommended for this PC</source>
            <translation>Recommandé pour ce PC</translation>
        </message>
        <message>
            <source>Just try the starter</source>
            <translation>Essayer juste le modèle de départ</translation>
        </message>
        <message>
            <source>A small Mixture of Experts that runs on any machine, converted here from a PyPI package, for a first look. It gets facts wrong and may repeat itself.</source>
            <translation>Un petit « Mixture of Experts » qui fonctionne sur toute machine, converti ici à partir d’un paquet PyPI, pour un premier aperçu. Il se trompe sur les faits et se répète parfois.</translation>
        </message>
        <message>
            <source>Looking at this PC…</source>
            <translation>Examen de ce PC…</translation>
        </message>
        <message>
            <source>Choose a first model</source>
            <translation>Choisir un premier modèle</translation>
        </message>
        <message>
            <source>Welcome to Switchyard</source>
            <translation>Bienvenue dans Switchyard</translation>
        </message>
        <message>
            <source>Open a model file…</source>
            <translation>Ouvrir un fichier de modèle…</translation>
        </message>
        <message>
            <source>Search for others…</source>
            <translation>En chercher d’autres…</translation>
        </message>
        <message>
            <source>Use a remote server…</source>
            <translation>Utiliser un serveur distant…</translation>
        </message>
        <message>
            <source>Go to the chats</source>
            <translation>Aller aux discussions</translation>
        </message>
        <message>
            <source>First the engine, then a model. Nothing is downloaded before you click.</source>
            <translation>D’abord le moteur, puis un modèle. Rien n’est téléchargé avant votre clic.</translation>
        </message>
        <message>
            <source>Choose a first model. Nothing is downloaded before you click.</source>
            <translation>Choisissez un premier modèle. Rien n’est téléchargé avant votre clic.</translation>
        </message>
        <message>
            <source>No model of the catalogue suits this PC: the starter runs everywhere.</source>
            <translation>Aucun modèle du catalogue ne convient à ce PC : le modèle de départ fonctionne partout.</translation>
        </message>
    </context>
    <context>
        <name>Fit</name>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>{0} MB</source>
            <translation>{0} Mo</translation>
        </message>
        <message>
            <source>Fast</source>
            <translation>Rapide</translation>
        </message>
        <message>
            <source>Works</source>
            <translation>Convient</translation>
        </message>
        <message>
            <source>Batch only</source>
            <translation>Lots seulement</translation>
        </message>
        <message>
            <source>Too large</source>
            <translation>Trop grand</translation>
        </message>
        <message>
            <source>original</source>
            <translation>original</translation>
        </message>
        <message>
            <source>near-original</source>
            <translation>quasi original</translation>
        </message>
        <message>
            <source>good quality</source>
            <translation>bonne qualité</translation>
        </message>
        <message>
            <source>fair quality</source>
            <translation>qualité moyenne</translation>
        </message>
        <message>
            <source>poor quality</source>
            <translation>qualité faible</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} tokens/s</translation>
        </message>
        <message>
            <source>about {0} tokens/s</source>
            <translation>environ {0} tokens/s</translation>
        </message>
        <message>
            <source>measured here</source>
            <translation>mesuré ici</translation>
        </message>
        <message>
            <source>estimated, {0} to {1}</source>
            <translation>estimé, {0} à {1}</translation>
        </message>
        <message>
            <source>first token after {0} s</source>
            <translation>premier token après {0} s</translation>
        </message>
        <message>
            <source>first token after about {0} s</source>
            <translation>premier token après environ {0} s</translation>
        </message>
        <message>
            <source>pictures: about {0} s each on the graphics card, {1}</source>
            <translation>images : environ {0} s chacune sur la carte graphique, {1}</translation>
        </message>
        <message>
            <source>pictures: about {0} s each on the CPU, {1}</source>
            <translation>images : environ {0} s chacune sur le processeur, {1}</translation>
        </message>
        <message>
            <source>download</source>
            <translation>téléchargement</translation>
        </message>
        <message>
            <source>converted weights</source>
            <translation>poids convertis</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Disque</translation>
        </message>
        <message>
            <source>Library</source>
            <translation>Bibliothèque</translation>
        </message>
        <message>
            <source>recommended</source>
            <translation>recommandé</translation>
        </message>
        <message numerus="yes">
            <source>{0} and {1} more</source>
            <translation>
                <numerusform>{0} et {1} autre</numerusform>
                <numerusform>{0} et {1} autres</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} GB</source>
            <translation>{0} Go</translation>
        </message>
        <message>
            <source>{0} GB/s</source>
            <translation>{0} Go/s</translation>
        </message>
        <message>
            <source>{0} s</source>
            <translation>{0} s</translation>
        </message>
        <message>
            <source>{0} min</source>
            <translation>{0} min</translation>
        </message>
        <message>
            <source>{0} h {1} min</source>
            <translation>{0} h {1} min</translation>
        </message>
        <message>
            <source>{0} h</source>
            <translation>{0} h</translation>
        </message>
        <message numerus="yes">
            <source>{0} days</source>
            <translation>
                <numerusform>{0} jour</numerusform>
                <numerusform>{0} jours</numerusform>
            </translation>
        </message>
        <message>
            <source>{0} MB/s</source>
            <translation>{0} Mo/s</translation>
        </message>
    </context>
    <context>
        <name>FitCardView</name>
        <message>
            <source>Context in tokens</source>
            <translation>Contexte en tokens</translation>
        </message>
        <message>
            <source>Memory for the expert cache</source>
            <translation>Mémoire du cache d’experts</translation>
        </message>
        <message>
            <source>VRAM to use</source>
            <translation>VRAM à utiliser</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>Télécharger</translation>
        </message>
        <message>
            <source>Load anyway…</source>
            <translation>Charger quand même…</translation>
        </message>
        <message>
            <source>RAM to use</source>
            <translation>RAM à utiliser</translation>
        </message>
        <message>
            <source>Reading what the repository holds…</source>
            <translation>Lecture du contenu du dépôt…</translation>
        </message>
        <message>
            <source>Reading headers: {0} of {1} files…</source>
            <translation>Lecture des en-têtes : {0} fichiers sur {1}…</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} tokens</translation>
        </message>
        <message>
            <source>all that is free</source>
            <translation>tout ce qui est libre</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>au plus {0}</translation>
        </message>
        <message>
            <source>runs in {0}</source>
            <translation>s’exécute en {0}</translation>
        </message>
        <message>
            <source>keys and values of that context: {0}</source>
            <translation>clés et valeurs de ce contexte : {0}</translation>
        </message>
        <message>
            <source>Download {0}</source>
            <translation>Télécharger {0}</translation>
        </message>
        <message>
            <source>Downloading {0}</source>
            <translation>Téléchargement de {0}</translation>
        </message>
        <message>
            <source>Load {0}</source>
            <translation>Charger {0}</translation>
        </message>
        <message>
            <source>Load {0} anyway</source>
            <translation>Charger {0} quand même</translation>
        </message>
        <message>
            <source>There is no {0} here. {1} would be downloaded: choose another row to take that one.</source>
            <translation>{0} n’existe pas ici. {1} serait téléchargé : choisissez une autre ligne pour prendre celui-là.</translation>
        </message>
        <message>
            <source>No file was named. {0} would be downloaded: choose another row to take that one.</source>
            <translation>Aucun fichier n’a été indiqué. {0} serait téléchargé : choisissez une autre ligne pour prendre celui-là.</translation>
        </message>
        <message>
            <source>Context</source>
            <translation>Contexte</translation>
        </message>
    </context>
    <context>
        <name>FitDelegate</name>
        <message>
            <source>recommended</source>
            <translation>recommandé</translation>
        </message>
    </context>
    <context>
        <name>FitTable</name>
        <message>
            <source>File</source>
            <translation>Fichier</translation>
        </message>
        <message>
            <source>Memory</source>
            <translation>Mémoire</translation>
        </message>
        <message>
            <source>Speed</source>
            <translation>Vitesse</translation>
        </message>
        <message>
            <source>On this PC</source>
            <translation>Sur ce PC</translation>
        </message>
        <message>
            <source>Files, and how they would run here</source>
            <translation>Fichiers, et comment ils fonctionneraient ici</translation>
        </message>
    </context>
    <context>
        <name>FoldCard</name>
        <message>
            <source>Edit the summary</source>
            <translation>Modifier le résumé</translation>
        </message>
        <message>
            <source>Summarise again</source>
            <translation>Résumer à nouveau</translation>
        </message>
        <message>
            <source>Send the turns again</source>
            <translation>Renvoyer les échanges</translation>
        </message>
        <message>
            <source>The model reads the turns themselves again, as far as they fit.</source>
            <translation>Le modèle relit les échanges eux-mêmes, dans la mesure où ils tiennent.</translation>
        </message>
        <message>
            <source>Hide the turns</source>
            <translation>Masquer les échanges</translation>
        </message>
        <message>
            <source>Show the turns</source>
            <translation>Afficher les échanges</translation>
        </message>
        <message>
            <source>Write a summary</source>
            <translation>Écrire un résumé</translation>
        </message>
        <message>
            <source>Summary of the earlier turns</source>
            <translation>Résumé des échanges précédents</translation>
        </message>
        <message>
            <source>Summary of one earlier turn</source>
            <translation>Résumé d’un échange précédent</translation>
        </message>
        <message numerus="yes">
            <source>Summary of {0} earlier turns</source>
            <translation>
                <numerusform>Résumé de {0} échange précédent</numerusform>
                <numerusform>Résumé de {0} échanges précédents</numerusform>
            </translation>
        </message>
        <message>
            <source>One earlier turn is left out</source>
            <translation>Un échange précédent est omis</translation>
        </message>
        <message numerus="yes">
            <source>{0} earlier turns are left out</source>
            <translation>
                <numerusform>{0} échange précédent est omis</numerusform>
                <numerusform>{0} échanges précédents sont omis</numerusform>
            </translation>
        </message>
        <message>
            <source>These turns were changed since the summary was made.</source>
            <translation>Ces échanges ont été modifiés depuis le résumé.</translation>
        </message>
        <message>
            <source>The model reads nothing of them. They are kept, and can be sent again.</source>
            <translation>Le modèle n’en lit rien. Ils sont conservés et peuvent être renvoyés.</translation>
        </message>
        <message>
            <source>you</source>
            <translation>vous</translation>
        </message>
        <message>
            <source>The model reads this instead of the turns, which are kept. Written by {0}.</source>
            <translation>Le modèle lit ceci au lieu des échanges, qui sont conservés. Écrit par {0}.</translation>
        </message>
    </context>
    <context>
        <name>FolderChoice</name>
        <message>
            <source>Download folder</source>
            <translation>Dossier des téléchargements</translation>
        </message>
        <message>
            <source>Download to</source>
            <translation>Télécharger vers</translation>
        </message>
        <message>
            <source>Library</source>
            <translation>Bibliothèque</translation>
        </message>
        <message>
            <source>not connected</source>
            <translation>non connecté</translation>
        </message>
        <message>
            <source>{0} free</source>
            <translation>{0} libres</translation>
        </message>
    </context>
    <context>
        <name>FoldersDialog</name>
        <message>
            <source>Model folders</source>
            <translation>Dossiers de modèles</translation>
        </message>
        <message>
            <source>Models in these folders are listed and used where they lie. The Models page asks which of them a download goes into. Those of LM Studio, Ollama, Jan, GPT4All and the hub's own cache are found automatically.</source>
            <translation>Les modèles de ces dossiers sont listés et utilisés là où ils se trouvent. La page Modèles demande dans lequel placer un téléchargement. Ceux de LM Studio, Ollama, Jan, GPT4All et du cache du hub sont trouvés automatiquement.</translation>
        </message>
        <message>
            <source>Add a folder…</source>
            <translation>Ajouter un dossier…</translation>
        </message>
        <message>
            <source>Remove from list</source>
            <translation>Retirer de la liste</translation>
        </message>
        <message>
            <source>Open</source>
            <translation>Ouvrir</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>Folder with models</source>
            <translation>Dossier contenant des modèles</translation>
        </message>
    </context>
    <context>
        <name>FormFoot</name>
        <message>
            <source>Cancel</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>Start</source>
            <translation>Démarrer</translation>
        </message>
        <message>
            <source>Checking…</source>
            <translation>Vérification…</translation>
        </message>
    </context>
    <context>
        <name>FoundList</name>
        <message>
            <source>Models to get</source>
            <translation>Modèles disponibles</translation>
        </message>
    </context>
    <context>
        <name>HelpMark</name>
        <message>
            <source>What is “{0}”?</source>
            <translation>Qu’est-ce que « {0} » ?</translation>
        </message>
    </context>
    <context>
        <name>HereCard</name>
        <message>
            <source>Already on this PC</source>
            <translation>Déjà sur ce PC</translation>
        </message>
        <message>
            <source>One more is on the Models page.</source>
            <translation>Un autre se trouve sur la page Modèles.</translation>
        </message>
        <message numerus="yes">
            <source>{0} more are on the Models page.</source>
            <translation>
                <numerusform>{0} autre se trouve sur la page Modèles.</numerusform>
                <numerusform>{0} autres se trouvent sur la page Modèles.</numerusform>
            </translation>
        </message>
        <message>
            <source>Use</source>
            <translation>Utiliser</translation>
        </message>
        <message>
            <source>Use {0}</source>
            <translation>Utiliser {0}</translation>
        </message>
    </context>
    <context>
        <name>HubCard</name>
        <message>
            <source>Finding models</source>
            <translation>Trouver des modèles</translation>
        </message>
        <message>
            <source>Load from file…</source>
            <translation>Charger depuis un fichier…</translation>
        </message>
        <message>
            <source>Catalogue of recommendations</source>
            <translation>Catalogue de recommandations</translation>
        </message>
        <message>
            <source>Asked instead of Hugging Face, also on the command line.</source>
            <translation>Interrogé à la place de Hugging Face, aussi en ligne de commande.</translation>
        </message>
        <message>
            <source>HF_ENDPOINT in the environment names {0}, which is used.</source>
            <translation>HF_ENDPOINT dans l’environnement indique {0}, qui est utilisé.</translation>
        </message>
        <message>
            <source>Mirror of the hub</source>
            <translation>Miroir du hub</translation>
        </message>
        <message>
            <source>PyPI and PyTorch</source>
            <translation>PyPI et PyTorch</translation>
        </message>
        <message>
            <source>Where the engine of an installed Switchyard is fetched from instead.</source>
            <translation>D’où le moteur d’un Switchyard installé est téléchargé à la place.</translation>
        </message>
        <message>
            <source>Mirror of packages</source>
            <translation>Miroir de paquets</translation>
        </message>
        <message>
            <source>the system's</source>
            <translation>celui du système</translation>
        </message>
        <message>
            <source>For everything from the network; where it wants a login, as http://NAME:PASSWORD@HOST:PORT.</source>
            <translation>Pour tout ce qui vient du réseau ; s’il faut s’identifier, sous la forme http://NAME:PASSWORD@HOST:PORT.</translation>
        </message>
        <message>
            <source>Proxy</source>
            <translation>Proxy</translation>
        </message>
        <message>
            <source>None is kept. One is asked for when a model needs it.</source>
            <translation>Aucun n’est conservé. Il est demandé quand un modèle en a besoin.</translation>
        </message>
        <message>
            <source>In the system's keyring, or for this run only where there is none.</source>
            <translation>Dans le trousseau du système, ou jusqu’à la fermeture seulement s’il n’y en a pas.</translation>
        </message>
        <message>
            <source>Access tokens</source>
            <translation>Jetons d’accès</translation>
        </message>
        <message>
            <source>A newer catalogue</source>
            <translation>Un catalogue plus récent</translation>
        </message>
        <message>
            <source>Catalogues (*.json)</source>
            <translation>Catalogues (*.json)</translation>
        </message>
        <message>
            <source>{0} models, as of {1}.</source>
            <translation>{0} modèles, à la date du {1}.</translation>
        </message>
        <message>
            <source>The token of another program is still used for {0}: see “hf auth logout”, or HF_TOKEN.</source>
            <translation>Le jeton d’un autre programme est encore utilisé pour {0} : voir « hf auth logout », ou HF_TOKEN.</translation>
        </message>
    </context>
    <context>
        <name>InputCard</name>
        <message>
            <source>Another file…</source>
            <translation>Autre fichier…</translation>
        </message>
        <message>
            <source>First rows of the file</source>
            <translation>Premières lignes du fichier</translation>
        </message>
        <message>
            <source>Encoding</source>
            <translation>Encodage</translation>
        </message>
        <message>
            <source>Encoding: automatic</source>
            <translation>Encodage : automatique</translation>
        </message>
        <message>
            <source>Separator</source>
            <translation>Séparateur</translation>
        </message>
        <message>
            <source>Separator: automatic</source>
            <translation>Séparateur : automatique</translation>
        </message>
        <message>
            <source>tab</source>
            <translation>tabulation</translation>
        </message>
        <message>
            <source>Sheet</source>
            <translation>Feuille</translation>
        </message>
        <message>
            <source>A text file is one row</source>
            <translation>Un fichier texte est une ligne</translation>
        </message>
        <message>
            <source>Otherwise each line is a row</source>
            <translation>Sinon, chaque ligne de texte est une ligne</translation>
        </message>
        <message>
            <source>Reading the file…</source>
            <translation>Lecture du fichier…</translation>
        </message>
        <message>
            <source>An OpenAI batch file: rows have their own messages and settings; answers are in OpenAI's format.</source>
            <translation>Un fichier batch d’OpenAI : les lignes ont leurs propres messages et réglages ; les réponses sont au format d’OpenAI.</translation>
        </message>
        <message>
            <source>Sheet: {0}</source>
            <translation>Feuille : {0}</translation>
        </message>
        <message>
            <source>Some rows are not valid text in this encoding: choose another below the table.</source>
            <translation>Certaines lignes ne sont pas du texte valide dans cet encodage : choisissez-en un autre sous le tableau.</translation>
        </message>
        <message>
            <source>Some of the first rows cannot be answered: one {0}.</source>
            <translation>Certaines des premières lignes ne peuvent pas être traitées. L’une d’elles : {0}.</translation>
        </message>
        <message>
            <source>1 column</source>
            <translation>1 colonne</translation>
        </message>
        <message numerus="yes">
            <source>{0} columns</source>
            <translation>
                <numerusform>{0} colonne</numerusform>
                <numerusform>{0} colonnes</numerusform>
            </translation>
        </message>
        <message>
            <source>1 row</source>
            <translation>1 ligne</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows</source>
            <translation>
                <numerusform>{0} ligne</numerusform>
                <numerusform>{0} lignes</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>Installation</name>
        <message>
            <source>The installation could not be started: install Switchyard again.</source>
            <translation>L’installation n’a pas pu démarrer : réinstallez Switchyard.</translation>
        </message>
    </context>
    <context>
        <name>JobDelegate</name>
        <message>
            <source>{0} failed</source>
            <translation>{0} en échec</translation>
        </message>
    </context>
    <context>
        <name>JobStrip</name>
        <message>
            <source>Jobs</source>
            <translation>Tâches</translation>
        </message>
    </context>
    <context>
        <name>Kept</name>
        <message>
            <source>{0} was damaged; it is kept as {1}, and a new one is begun.</source>
            <translation>{0} était endommagé ; il est conservé sous {1}, et un nouveau est commencé.</translation>
        </message>
        <message>
            <source>{0} could not be read ({1}): what you keep now is lost when the window closes.</source>
            <translation>{0} n’a pas pu être lu ({1}) : ce que vous conservez maintenant sera perdu à la fermeture de la fenêtre.</translation>
        </message>
        <message>
            <source>{0} could not be saved ({1}); free some space or check its permissions.</source>
            <translation>{0} n’a pas pu être enregistré ({1}) ; libérez de l’espace ou vérifiez les autorisations.</translation>
        </message>
    </context>
    <context>
        <name>KeptCard</name>
        <message>
            <source>Continuing chats</source>
            <translation>Reprise des discussions</translation>
        </message>
        <message>
            <source>Clear</source>
            <translation>Vider</translation>
        </message>
        <message>
            <source>Clear kept context</source>
            <translation>Supprimer le contexte gardé</translation>
        </message>
        <message>
            <source>Now</source>
            <translation>Actuellement</translation>
        </message>
        <message>
            <source>{0} of all chats and models together.</source>
            <translation>{0} pour toutes les discussions et tous les modèles.</translation>
        </message>
        <message>
            <source>Nothing is kept.</source>
            <translation>Rien n’est gardé.</translation>
        </message>
        <message>
            <source>The folder cannot be changed: {0}</source>
            <translation>Le dossier ne peut pas être changé : {0}</translation>
        </message>
    </context>
    <context>
        <name>Lane</name>
        <message>
            <source>Phase</source>
            <translation>Phase</translation>
        </message>
        <message>
            <source>What the model is doing: reading a prompt (prefill), writing an answer token by token (decode), or a batch step, which takes many rows through the model at once. Each tick is a token: a word or a part of one.</source>
            <translation>Ce que fait le modèle : lire un prompt (préremplissage), écrire une réponse token par token (décodage), ou une étape de lots, qui fait passer beaucoup de lignes à la fois dans le modèle. Chaque repère est un token : un mot ou une partie de mot.</translation>
        </message>
        <message>
            <source>Requests</source>
            <translation>Requêtes</translation>
        </message>
        <message>
            <source>A row for each answer that is being worked on, for this window or other programs, here or at another server: waiting (hatched), its prompt being read (pale), its answer being written. A batch job has a row, too (outlined).</source>
            <translation>Une ligne pour chaque réponse en cours, pour cette fenêtre ou d’autres programmes, ici ou sur un autre serveur : en attente (hachuré), prompt en lecture (pâle), réponse en écriture. Une tâche par lots a aussi sa ligne (encadrée).</translation>
        </message>
        <message>
            <source>Sweeps</source>
            <translation>Passes</translation>
        </message>
        <message>
            <source>What goes through the layers together: one token of each answer that is being written, and (hatched) pieces of prompts that are being read. Batch jobs have sweeps of their own. From close up each sweep is a block with its tokens.</source>
            <translation>Ce qui traverse les couches ensemble : un token de chaque réponse en cours d’écriture, et (hachurés) des morceaux de prompts en cours de lecture. Les tâches par lots ont leurs propres passes. De près, chaque passe est un bloc avec ses tokens.</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>How busy the graphics card is with our model. In gaps it waits for something else, usually for weights or for the processor.</source>
            <translation>À quel point notre modèle occupe la carte graphique. Dans les trous, elle attend autre chose, en général des poids ou le processeur.</translation>
        </message>
        <message>
            <source>computing on the GPU</source>
            <translation>calcul sur le GPU</translation>
        </message>
        <message>
            <source>To the GPU</source>
            <translation>Vers le GPU</translation>
        </message>
        <message>
            <source>Weights being copied from RAM to the graphics card. This is the cost of a miss: an expert that is needed but not in the card's memory.</source>
            <translation>Poids copiés de la RAM vers la carte graphique. C’est le prix d’un défaut : un expert nécessaire mais absent de la mémoire de la carte.</translation>
        </message>
        <message>
            <source>copying weights to the GPU</source>
            <translation>copie des poids vers le GPU</translation>
        </message>
        <message>
            <source>to the GPU</source>
            <translation>vers le GPU</translation>
        </message>
        <message>
            <source>passing results to the GPU</source>
            <translation>transmission des résultats au GPU</translation>
        </message>
        <message>
            <source>results</source>
            <translation>résultats</translation>
        </message>
        <message>
            <source>From the GPU</source>
            <translation>Depuis le GPU</translation>
        </message>
        <message>
            <source>Copies from the graphics card to RAM, mostly small results. Large amounts are a batch's data that has no room on the card.</source>
            <translation>Copies de la carte graphique vers la RAM, surtout de petits résultats. De grandes quantités sont les données d’un lot qui n’ont pas de place sur la carte.</translation>
        </message>
        <message>
            <source>copying from the GPU</source>
            <translation>copie depuis le GPU</translation>
        </message>
        <message>
            <source>from the GPU</source>
            <translation>depuis le GPU</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>How busy the processor is with our model: with experts, the parts of a layer of which each token uses only a few, and with attention, which looks back at the text so far. Together they can fill the lane.</source>
            <translation>À quel point notre modèle occupe le processeur : avec les experts, ces parties d’une couche dont chaque token n’utilise que quelques-unes, et avec l’attention, qui relit le texte déjà écrit. Ensemble, ils peuvent remplir la piste.</translation>
        </message>
        <message>
            <source>computing experts on the CPU</source>
            <translation>calcul des experts sur le processeur</translation>
        </message>
        <message>
            <source>CPU experts</source>
            <translation>experts CPU</translation>
        </message>
        <message>
            <source>attention and other layers on the CPU</source>
            <translation>attention et autres couches sur le processeur</translation>
        </message>
        <message>
            <source>CPU attention</source>
            <translation>attention CPU</translation>
        </message>
        <message>
            <source>Pictures</source>
            <translation>Images</translation>
        </message>
        <message>
            <source>Pictures being turned into tokens by the part of the model that sees, on the graphics card or the processor. Each is read once: the next question about it begins at once.</source>
            <translation>Images que la partie du modèle qui voit transforme en tokens, sur la carte graphique ou le processeur. Chacune est lue une fois : la question suivante à son sujet commence aussitôt.</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>lecture d'images</translation>
        </message>
        <message>
            <source>pictures</source>
            <translation>images</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Disque</translation>
        </message>
        <message>
            <source>Experts being read from disk because RAM has no room for them. If this lane is often full, more RAM or a lower precision helps most.</source>
            <translation>Experts lus sur le disque parce que la RAM n’a pas de place pour eux. Si cette piste est souvent pleine, plus de RAM ou une précision plus basse aide le plus.</translation>
        </message>
        <message>
            <source>reading from disk</source>
            <translation>lecture du disque</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>disque</translation>
        </message>
        <message>
            <source>Experts</source>
            <translation>Experts</translation>
        </message>
        <message>
            <source>Where the needed experts were: in the card's memory (a hit), copied there first (fetched, a miss), or computed on the processor instead. More hits mean less waiting; without a graphics card everything is computed on the processor.</source>
            <translation>Où se trouvaient les experts nécessaires : dans la mémoire de la carte (un succès), copiés d’abord (transférés, un défaut), ou calculés plutôt sur le processeur. Plus de succès, c’est moins d’attente ; sans carte graphique, tout est calculé sur le processeur.</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>Tokens/s</translation>
        </message>
        <message>
            <source>How many tokens per second are written while the model is working. For a batch this counts the tokens of all rows, including their prompts.</source>
            <translation>Combien de tokens par seconde sont écrits pendant que le modèle travaille. Pour un lot, cela compte les tokens de toutes les lignes, prompts compris.</translation>
        </message>
        <message>
            <source>GPU busy</source>
            <translation>Charge GPU</translation>
        </message>
        <message>
            <source>How busy the graphics card is, for all programs.</source>
            <translation>À quel point tous les programmes occupent la carte graphique.</translation>
        </message>
        <message>
            <source>CPU busy</source>
            <translation>Charge CPU</translation>
        </message>
        <message>
            <source>How busy the whole processor is: filled for Switchyard, dashed for all programs. A wide gap between the two is what other programs use.</source>
            <translation>À quel point tout le processeur est occupé : plein pour Switchyard, tirets pour tous les programmes. L’écart entre les deux est ce qu’utilisent les autres programmes.</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Memory in use: filled for Switchyard, dashed for all programs.</source>
            <translation>Mémoire utilisée : plein pour Switchyard, tirets pour tous les programmes.</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>The card's memory in use: filled for Switchyard, dashed for all programs.</source>
            <translation>Mémoire de la carte utilisée : plein pour Switchyard, tirets pour tous les programmes.</translation>
        </message>
        <message>
            <source>PCIe</source>
            <translation>PCIe</translation>
        </message>
        <message>
            <source>Traffic on the graphics card's slot, both ways, of all programs.</source>
            <translation>Trafic du port de la carte graphique, dans les deux sens, tous programmes confondus.</translation>
        </message>
        <message>
            <source>Page faults</source>
            <translation>Défauts de page</translation>
        </message>
        <message>
            <source>Memory pages that the system had to map first: many slow things down.</source>
            <translation>Pages de mémoire que le système a dû d’abord associer : en grand nombre, elles ralentissent.</translation>
        </message>
        <message>
            <source>Disk I/O</source>
            <translation>Disque</translation>
        </message>
        <message>
            <source>Reads from the disk and (dashed) writes to it, of all programs.</source>
            <translation>Lectures du disque et (tirets) écritures, tous programmes confondus.</translation>
        </message>
        <message>
            <source>GPU power</source>
            <translation>Puissance GPU</translation>
        </message>
        <message>
            <source>The power that the graphics card draws.</source>
            <translation>La puissance que consomme la carte graphique.</translation>
        </message>
        <message>
            <source>CPU power</source>
            <translation>Puissance CPU</translation>
        </message>
        <message>
            <source>The power that the processor draws.</source>
            <translation>La puissance que consomme le processeur.</translation>
        </message>
        <message>
            <source>GPU clock</source>
            <translation>Fréquence GPU</translation>
        </message>
        <message>
            <source>The graphics card's clock rate: it falls when the card is too hot.</source>
            <translation>La fréquence de la carte graphique : elle baisse quand la carte est trop chaude.</translation>
        </message>
        <message>
            <source>CPU clock</source>
            <translation>Fréquence CPU</translation>
        </message>
        <message>
            <source>The processor's clock rate: it falls when too hot or saving power.</source>
            <translation>La fréquence du processeur : elle baisse s’il est trop chaud ou économise l’énergie.</translation>
        </message>
        <message>
            <source>GPU heat</source>
            <translation>Température GPU</translation>
        </message>
        <message>
            <source>How hot the graphics card is.</source>
            <translation>La température de la carte graphique.</translation>
        </message>
        <message>
            <source>CPU heat</source>
            <translation>Température CPU</translation>
        </message>
        <message>
            <source>How hot the processor is.</source>
            <translation>La température du processeur.</translation>
        </message>
    </context>
    <context>
        <name>Languages</name>
        <message>
            <source>Switchyard does not speak {0} yet, so it is in English. Settings has its languages.</source>
            <translation>Switchyard ne parle pas encore cette langue ({0}) et s’affiche donc en anglais. Les langues disponibles sont dans les paramètres.</translation>
        </message>
    </context>
    <context>
        <name>LicencesDialog</name>
        <message>
            <source>Licences</source>
            <translation>Licences</translation>
        </message>
    </context>
    <context>
        <name>Loading</name>
        <message>
            <source>Opening the model</source>
            <translation>Ouverture du modèle</translation>
        </message>
        <message>
            <source>Reading weights</source>
            <translation>Lecture des poids</translation>
        </message>
        <message>
            <source>Converting weights; later starts skip this</source>
            <translation>Conversion des poids ; les prochains démarrages s’en passeront</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>Chargement du modèle</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} sur {1}</translation>
        </message>
        <message>
            <source>{0} left</source>
            <translation>{0} restants</translation>
        </message>
    </context>
    <context>
        <name>MachineCard</name>
        <message>
            <source>Machine</source>
            <translation>Machine</translation>
        </message>
        <message>
            <source>Sensor and driver data of the whole machine, other programs included. If the processor is much busier than our share of it, other programs are slowing the model down.</source>
            <translation>Données des capteurs et pilotes de toute la machine, autres programmes compris. Si le processeur est bien plus occupé que notre part, d’autres programmes ralentissent le modèle.</translation>
        </message>
        <message>
            <source>from sensors and drivers</source>
            <translation>des capteurs et pilotes</translation>
        </message>
        <message>
            <source>Graphics card: no sensor data</source>
            <translation>Carte graphique : pas de données de capteurs</translation>
        </message>
        <message>
            <source>No sensor data yet.</source>
            <translation>Pas encore de données de capteurs.</translation>
        </message>
        <message>
            <source>CPU {0}%</source>
            <translation>CPU {0} %</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>ours {0}%</source>
            <translation>nous {0} %</translation>
        </message>
        <message>
            <source>{0} GHz</source>
            <translation>{0} GHz</translation>
        </message>
        <message>
            <source>{0} °C</source>
            <translation>{0} °C</translation>
        </message>
        <message>
            <source>power not available</source>
            <translation>consommation indisponible</translation>
        </message>
        <message>
            <source>{0} W</source>
            <translation>{0} W</translation>
        </message>
        <message>
            <source>Disk {0} MB/s read, {1} MB/s written</source>
            <translation>Disque : {0} Mo/s lus, {1} Mo/s écrits</translation>
        </message>
        <message>
            <source>{0}% busy</source>
            <translation>occupé à {0} %</translation>
        </message>
        <message>
            <source>page faults {0}/s, {1}/s from disk</source>
            <translation>défauts de page {0}/s, dont {1}/s du disque</translation>
        </message>
    </context>
    <context>
        <name>MachineFooter</name>
        <message>
            <source>Memory</source>
            <translation>Mémoire</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>No GPU in use</source>
            <translation>Aucun GPU utilisé</translation>
        </message>
        <message>
            <source>Show what holds the memory</source>
            <translation>Montrer ce qui occupe la mémoire</translation>
        </message>
        <message>
            <source>Fold the memory into one bar</source>
            <translation>Replier la mémoire en une barre</translation>
        </message>
        <message>
            <source>Model: the weights that every token needs. Its experts: those of which each token needs a few. Chat memory: keys and values of conversations (KV). These figures are the engine's; RAM in use and in all are the operating system's.</source>
            <translation>Modèle : les poids dont chaque token a besoin. Ses experts : ceux dont chaque token n’utilise que quelques-uns. Mémoire de discussion : clés et valeurs des conversations (KV). Ces chiffres viennent du moteur ; la RAM utilisée et totale, du système d’exploitation.</translation>
        </message>
        <message>
            <source>VRAM in use and total: from the driver.</source>
            <translation>VRAM utilisée et totale : selon le pilote.</translation>
        </message>
        <message>
            <source>Memory of the emulated graphics card: from the engine.</source>
            <translation>Mémoire de la carte graphique émulée : selon le moteur.</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modèle</translation>
        </message>
        <message>
            <source>Its experts</source>
            <translation>Ses experts</translation>
        </message>
        <message>
            <source>Chat memory</source>
            <translation>Mém. discussion</translation>
        </message>
        <message>
            <source>Switchyard</source>
            <translation>Switchyard</translation>
        </message>
        <message>
            <source>Other programs</source>
            <translation>Autres</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1 cœur</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0} cœur</numerusform>
                <numerusform>{0} cœurs</numerusform>
            </translation>
        </message>
        <message>
            <source>{0}, not in use</source>
            <translation>{0}, non utilisé</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1 thread</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0} thread</numerusform>
                <numerusform>{0} threads</numerusform>
            </translation>
        </message>
        <message>
            <source>tuned</source>
            <translation>optimisé</translation>
        </message>
        <message>
            <source>Where the model runs, as reported by the engine.</source>
            <translation>Où s’exécute le modèle, selon le moteur.</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>Chargement du modèle</translation>
        </message>
        <message>
            <source>Loading the model, {0}%</source>
            <translation>Chargement du modèle, {0} %</translation>
        </message>
        <message>
            <source>Starting the engine</source>
            <translation>Démarrage du moteur</translation>
        </message>
        <message>
            <source>No model loaded</source>
            <translation>Aucun modèle chargé</translation>
        </message>
    </context>
    <context>
        <name>MachinePicture</name>
        <message>
            <source>Picture of this machine</source>
            <translation>Schéma de cette machine</translation>
        </message>
    </context>
    <context>
        <name>MainWindow</name>
        <message>
            <source>Switchyard {0} is available: get it in Settings.</source>
            <translation>Switchyard {0} est disponible : obtenez-le dans les paramètres.</translation>
        </message>
        <message>
            <source>Everywhere</source>
            <translation>Partout</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>Copié</translation>
        </message>
        <message>
            <source>The report is in {0}.</source>
            <translation>Le rapport se trouve dans {0}.</translation>
        </message>
        <message>
            <source>Copy report</source>
            <translation>Copier le rapport</translation>
        </message>
        <message>
            <source>Save report…</source>
            <translation>Enregistrer un rapport…</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>Switchyard hit an error last time. You can copy a report of it, or save one with versions, hardware and logs; neither has prompts, answers or names, and nothing was sent.</source>
            <translation>Switchyard a rencontré une erreur la dernière fois. Vous pouvez en copier un rapport, ou en enregistrer un avec les versions, le matériel et les journaux ; aucun ne contient de prompts, de réponses ou de noms, et rien n’a été envoyé.</translation>
        </message>
        <message>
            <source>{0} Your text is kept.</source>
            <translation>{0} Votre texte est conservé.</translation>
        </message>
        <message>
            <source>Your hardware has changed since the last tuning. {0}</source>
            <translation>Votre matériel a changé depuis la dernière optimisation. {0}</translation>
        </message>
        <message>
            <source>{0} now runs at {1} tokens/s, much faster than the {2} that Tune measured: the machine was busy then. Tune again to find the best settings.</source>
            <translation>{0} tourne maintenant à {1} tokens/s, bien plus vite que les {2} mesurés par Optimiser : la machine était alors occupée. Optimisez de nouveau pour trouver les meilleurs réglages.</translation>
        </message>
        <message>
            <source>The graphics card works again, but the model still runs on the CPU: reload it to use the card.</source>
            <translation>La carte graphique fonctionne de nouveau, mais le modèle tourne encore sur le processeur : rechargez-le pour utiliser la carte.</translation>
        </message>
        <message>
            <source>Restart engine</source>
            <translation>Redémarrer le moteur</translation>
        </message>
        <message>
            <source>Models</source>
            <translation>Modèles</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>Optimiser</translation>
        </message>
        <message>
            <source>Reload model</source>
            <translation>Recharger le modèle</translation>
        </message>
        <message>
            <source>Show these shortcuts</source>
            <translation>Afficher ces raccourcis</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>Quitter</translation>
        </message>
    </context>
    <context>
        <name>MakingRoom</name>
        <message>
            <source>A batch job is running.</source>
            <translation>Une tâche par lots est en cours.</translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself, so the job is paused and resumes when tuning ends. No answered row is lost.</source>
            <translation>L’optimisation a besoin du moteur pour elle seule : la tâche est mise en pause et reprend ensuite. Aucune ligne traitée n’est perdue.</translation>
        </message>
        <message>
            <source>Pause it and tune</source>
            <translation>Mettre en pause et optimiser</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>{0} tâche par lots est en cours.</numerusform>
                <numerusform>{0} tâches par lots sont en cours.</numerusform>
            </translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself, so the jobs are paused and resume when tuning ends. No answered row is lost.</source>
            <translation>L’optimisation a besoin du moteur pour elle seule : les tâches sont mises en pause et reprennent ensuite. Aucune ligne traitée n’est perdue.</translation>
        </message>
        <message>
            <source>Pause them and tune</source>
            <translation>Mettre en pause et optimiser</translation>
        </message>
        <message>
            <source>An answer is being written.</source>
            <translation>Une réponse est en cours d’écriture.</translation>
        </message>
        <message>
            <source>Tuning needs the engine to itself. A stopped answer keeps its text so far.</source>
            <translation>L’optimisation a besoin du moteur pour elle seule. Une réponse arrêtée garde le texte déjà écrit.</translation>
        </message>
        <message>
            <source>Tune after the answer</source>
            <translation>Optimiser après la réponse</translation>
        </message>
        <message>
            <source>Stop the answer</source>
            <translation>Arrêter la réponse</translation>
        </message>
        <message>
            <source>The batch job for {0} stays paused: it began in {1}, and the model now runs in {2}. “Keep as before” lets you resume it.</source>
            <translation>La tâche par lots de {0} reste en pause : elle a commencé en {1}, et le modèle tourne maintenant en {2}. « Garder comme avant » permet de la reprendre.</translation>
        </message>
    </context>
    <context>
        <name>MapLegend</name>
        <message>
            <source>Recent uses: each counts half as much after 128 tokens</source>
            <translation>Usages récents : après 128 tokens, chacun ne compte plus que pour moitié</translation>
        </message>
        <message>
            <source>in VRAM</source>
            <translation>en VRAM</translation>
        </message>
        <message>
            <source>in RAM</source>
            <translation>en RAM</translation>
        </message>
        <message>
            <source>only on disk</source>
            <translation>seulement sur le disque</translation>
        </message>
        <message>
            <source>fetching</source>
            <translation>en transfert</translation>
        </message>
        <message>
            <source>Dark to yellow: 0 to {0} recent uses</source>
            <translation>Du sombre au jaune : 0 à {0} usages récents</translation>
        </message>
        <message>
            <source>recent uses 0</source>
            <translation>usages récents 0</translation>
        </message>
    </context>
    <context>
        <name>MemoryCard</name>
        <message>
            <source>Memory</source>
            <translation>Mémoire</translation>
        </message>
        <message>
            <source>What fills the computer's memory and its graphics card's. Weights and experts are the model itself; KV (keys and values) is what it remembers of the conversation, and grows with its length. Kept context is that of other conversations, which go on at once with it.</source>
            <translation>Ce qui remplit la mémoire de l’ordinateur et celle de sa carte graphique. Les poids et les experts sont le modèle lui-même ; KV (clés et valeurs) est ce qu’il retient de la conversation, et grandit avec elle. Le contexte gardé est celui d’autres conversations, qui reprennent ainsi immédiatement.</translation>
        </message>
        <message>
            <source>Shows a model's memory once one is loaded.</source>
            <translation>Affiche la mémoire d’un modèle dès qu’il y en a un de chargé.</translation>
        </message>
        <message>
            <source>Parts of the model: counted by the engine. Total RAM: reported by the system.</source>
            <translation>Parties du modèle : comptées par le moteur. RAM totale : selon le système.</translation>
        </message>
        <message>
            <source>Computed context of chats, of all models, of what it may take (see Settings).</source>
            <translation>Contexte calculé des discussions, tous modèles confondus, par rapport à ce qu’il peut occuper (voir Paramètres).</translation>
        </message>
        <message>
            <source>Counted by the engine, of the memory it may use.</source>
            <translation>Compté par le moteur, par rapport à la mémoire qu’il peut utiliser.</translation>
        </message>
        <message>
            <source>free</source>
            <translation>libre</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Disque</translation>
        </message>
        <message>
            <source>VRAM (emulated)</source>
            <translation>VRAM (émulée)</translation>
        </message>
        <message>
            <source>VRAM {0}</source>
            <translation>VRAM {0}</translation>
        </message>
        <message>
            <source>weights</source>
            <translation>poids</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>experts</translation>
        </message>
        <message>
            <source>conversation (KV)</source>
            <translation>conversation (KV)</translation>
        </message>
        <message>
            <source>kept context</source>
            <translation>contexte gardé</translation>
        </message>
        <message>
            <source>staging</source>
            <translation>tampons de transfert</translation>
        </message>
        <message>
            <source>activations</source>
            <translation>activations</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>lecture d'images</translation>
        </message>
        <message>
            <source>the engine itself</source>
            <translation>le moteur lui-même</translation>
        </message>
        <message>
            <source>window and other programs</source>
            <translation>fenêtre et autres programmes</translation>
        </message>
    </context>
    <context>
        <name>MessageEditor</name>
        <message>
            <source>Cancel</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>Enregistrer</translation>
        </message>
        <message>
            <source>Ctrl+Enter</source>
            <translation>Ctrl+Entrée</translation>
        </message>
    </context>
    <context>
        <name>MessageTools</name>
        <message>
            <source>Saved prompts  /</source>
            <translation>Prompts enregistrés  /</translation>
        </message>
        <message>
            <source>More for this message</source>
            <translation>Plus pour ce message</translation>
        </message>
        <message>
            <source>Saved prompts…	/</source>
            <translation>Prompts enregistrés…	/</translation>
        </message>
        <message>
            <source>Save this message as a prompt…</source>
            <translation>Enregistrer ce message comme prompt…</translation>
        </message>
        <message>
            <source>Ask two, side by side…	Ctrl+Shift+D</source>
            <translation>Demander à deux, côte à côte…	Ctrl+Maj+D</translation>
        </message>
        <message>
            <source>Ask this of every row of a file…</source>
            <translation>Demander ceci pour chaque ligne d’un fichier…</translation>
        </message>
    </context>
    <context>
        <name>MissRatioPlot</name>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
        <message>
            <source>no room</source>
            <translation>pas de place</translation>
        </message>
        <message>
            <source>Miss-ratio curve</source>
            <translation>Courbe des défauts</translation>
        </message>
        <message>
            <source>Drag the handle to resize the cache. Hatched: more than the free memory.</source>
            <translation>Faites glisser la poignée pour redimensionner le cache. Hachuré : plus que la mémoire libre.</translation>
        </message>
        <message>
            <source>{0} experts</source>
            <translation>{0} experts</translation>
        </message>
        <message>
            <source>hits about {0}%</source>
            <translation>succès environ {0} %</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} tokens/s</translation>
        </message>
        <message>
            <source>Left and right move the handle, Enter resizes the cache, Escape resets the handle.</source>
            <translation>Gauche et droite déplacent la poignée, Entrée redimensionne le cache, Échap remet la poignée en place.</translation>
        </message>
        <message>
            <source>experts kept, of {0}</source>
            <translation>experts gardés, sur {0}</translation>
        </message>
        <message>
            <source>hits, expected</source>
            <translation>succès, attendus</translation>
        </message>
        <message>
            <source>LRU</source>
            <translation>LRU</translation>
        </message>
        <message>
            <source>tokens/s, predicted</source>
            <translation>tokens/s, prévus</translation>
        </message>
        <message>
            <source>too few tokens for a curve</source>
            <translation>trop peu de tokens pour une courbe</translation>
        </message>
        <message>
            <source>now</source>
            <translation>maintenant</translation>
        </message>
    </context>
    <context>
        <name>ModelCard</name>
        <message>
            <source>Tune…</source>
            <translation>Optimiser…</translation>
        </message>
        <message>
            <source>Speed</source>
            <translation>Vitesse</translation>
        </message>
        <message>
            <source>Times this machine and keeps the fastest settings.</source>
            <translation>Chronomètre cette machine et garde les réglages les plus rapides.</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Modèle de départ</translation>
        </message>
    </context>
    <context>
        <name>ModelDialog</name>
        <message>
            <source>Models (*.gguf *.safetensors config.json)</source>
            <translation>Modèles (*.gguf *.safetensors config.json)</translation>
        </message>
        <message>
            <source>Open a model file</source>
            <translation>Ouvrir un fichier de modèle</translation>
        </message>
    </context>
    <context>
        <name>ModelPicker</name>
        <message>
            <source>Models</source>
            <translation>Modèles</translation>
        </message>
        <message>
            <source>Find a model</source>
            <translation>Trouver un modèle</translation>
        </message>
        <message>
            <source>Loading the model</source>
            <translation>Chargement du modèle</translation>
        </message>
        <message>
            <source>Cancel loading</source>
            <translation>Annuler le chargement</translation>
        </message>
        <message>
            <source>Set as default</source>
            <translation>Définir par défaut</translation>
        </message>
        <message>
            <source>Open a model file…</source>
            <translation>Ouvrir un fichier de modèle…</translation>
        </message>
        <message>
            <source>Get more models…</source>
            <translation>Obtenir d’autres modèles…</translation>
        </message>
        <message>
            <source>Up, Down, Enter</source>
            <translation>Haut, Bas, Entrée</translation>
        </message>
        <message>
            <source>Choose a model in the list, and load it</source>
            <translation>Choisir un modèle dans la liste, et le charger</translation>
        </message>
        <message>
            <source>Remote servers</source>
            <translation>Serveurs distants</translation>
        </message>
        <message>
            <source>No model is on this PC yet.</source>
            <translation>Il n’y a pas encore de modèle sur ce PC.</translation>
        </message>
        <message>
            <source>Looking for models…</source>
            <translation>Recherche de modèles…</translation>
        </message>
        <message>
            <source>No model has that name.</source>
            <translation>Aucun modèle ne porte ce nom.</translation>
        </message>
        <message>
            <source>Use in this chat</source>
            <translation>Utiliser dans cette discussion</translation>
        </message>
        <message>
            <source>Unload</source>
            <translation>Décharger</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>Charger</translation>
        </message>
        <message>
            <source>Frees the memory that the model takes</source>
            <translation>Libère la mémoire qu’occupe le modèle</translation>
        </message>
        <message>
            <source>Use in new chats</source>
            <translation>Utiliser dans les nouvelles discussions</translation>
        </message>
        <message>
            <source>New chats begin with it; chats that are there stay as they are</source>
            <translation>Les nouvelles discussions commencent avec lui ; celles qui existent restent inchangées</translation>
        </message>
        <message>
            <source>Loaded whenever Switchyard starts</source>
            <translation>Chargé à chaque démarrage de Switchyard</translation>
        </message>
    </context>
    <context>
        <name>ModelTable</name>
        <message>
            <source>Load the model</source>
            <translation>Charger le modèle</translation>
        </message>
        <message>
            <source>Remove the model</source>
            <translation>Supprimer le modèle</translation>
        </message>
    </context>
    <context>
        <name>Models</name>
        <message>
            <source>Switchyard</source>
            <translation>Switchyard</translation>
        </message>
        <message>
            <source>Hub cache</source>
            <translation>Cache du hub</translation>
        </message>
        <message>
            <source>Your folder</source>
            <translation>Votre dossier</translation>
        </message>
        <message>
            <source>also in {0}</source>
            <translation>aussi dans {0}</translation>
        </message>
        <message>
            <source>damaged</source>
            <translation>endommagé</translation>
        </message>
        <message>
            <source>{0} tokens/s measured</source>
            <translation>{0} tokens/s mesurés</translation>
        </message>
        <message>
            <source>about {0} tokens/s predicted</source>
            <translation>environ {0} tokens/s prévus</translation>
        </message>
        <message>
            <source>never</source>
            <translation>jamais</translation>
        </message>
        <message>
            <source>today</source>
            <translation>aujourd’hui</translation>
        </message>
        <message>
            <source>yesterday</source>
            <translation>hier</translation>
        </message>
        <message numerus="yes">
            <source>{0} days ago</source>
            <translation>
                <numerusform>il y a {0} jour</numerusform>
                <numerusform>il y a {0} jours</numerusform>
            </translation>
        </message>
        <message>
            <source>loaded</source>
            <translation>chargé</translation>
        </message>
        <message>
            <source>default</source>
            <translation>par défaut</translation>
        </message>
        <message>
            <source>pictures</source>
            <translation>images</translation>
        </message>
        <message>
            <source>tools</source>
            <translation>outils</translation>
        </message>
        <message>
            <source>thinks</source>
            <translation>réfléchit</translation>
        </message>
        <message>
            <source>embeddings</source>
            <translation>embeddings</translation>
        </message>
        <message>
            <source>Sees pictures</source>
            <translation>Voit les images</translation>
        </message>
        <message>
            <source>Calls tools</source>
            <translation>Appelle des outils</translation>
        </message>
        <message>
            <source>Thinks first</source>
            <translation>Réfléchit d’abord</translation>
        </message>
        <message>
            <source>Embeds texts</source>
            <translation>Crée des embeddings</translation>
        </message>
        <message>
            <source>last used: {0}</source>
            <translation>dernier usage : {0}</translation>
        </message>
        <message>
            <source>{0} B parameters</source>
            <translation>{0} Md de paramètres</translation>
        </message>
        <message>
            <source>{0} experts, {1} per token</source>
            <translation>{0} experts, {1} par token</translation>
        </message>
        <message>
            <source>context {0}</source>
            <translation>contexte {0}</translation>
        </message>
        <message>
            <source>used {0}</source>
            <translation>utilisé : {0}</translation>
        </message>
        <message>
            <source>converted weights {0}</source>
            <translation>poids convertis {0}</translation>
        </message>
        <message>
            <source>Verifying {0}</source>
            <translation>Vérification de {0}</translation>
        </message>
        <message>
            <source>Moving {0}</source>
            <translation>Déplacement de {0}</translation>
        </message>
        <message>
            <source>Copying {0}</source>
            <translation>Copie de {0}</translation>
        </message>
        <message>
            <source>Importing {0}</source>
            <translation>Importation de {0}</translation>
        </message>
        <message>
            <source>Removing {0}</source>
            <translation>Suppression de {0}</translation>
        </message>
        <message>
            <source>Deleting the converted weights of {0}</source>
            <translation>Suppression des poids convertis de {0}</translation>
        </message>
        <message>
            <source>{0} was imported.</source>
            <translation>{0} a été importé.</translation>
        </message>
        <message>
            <source>{0} is now in {1}.</source>
            <translation>{0} est maintenant dans {1}.</translation>
        </message>
        <message>
            <source>{0} was copied to {1}.</source>
            <translation>{0} a été copié dans {1}.</translation>
        </message>
        <message>
            <source>{0} is in the trash ({1}).</source>
            <translation>{0} est dans la corbeille ({1}).</translation>
        </message>
        <message>
            <source>Everything else in {0} stays there.</source>
            <translation>Ce qu’il y a d’autre dans {0} y reste.</translation>
        </message>
        <message>
            <source>{0} were freed; loading {1} converts its weights again.</source>
            <translation>{0} ont été libérés ; charger {1} convertira de nouveau ses poids.</translation>
        </message>
        <message>
            <source>{0} is damaged, download it again: {1}</source>
            <translation>{0} est endommagé, téléchargez-le de nouveau : {1}</translation>
        </message>
        <message>
            <source>{0} is intact: every file has its checksum.</source>
            <translation>{0} est intact : chaque fichier a sa somme de contrôle.</translation>
        </message>
        <message>
            <source>{0} is complete; there are no checksums to compare with.</source>
            <translation>{0} est complet ; il n’y a pas de sommes de contrôle à comparer.</translation>
        </message>
        <message>
            <source>Code</source>
            <translation>Code</translation>
        </message>
        <message>
            <source>Tools</source>
            <translation>Outils</translation>
        </message>
        <message>
            <source>Pictures</source>
            <translation>Images</translation>
        </message>
        <message>
            <source>Embeddings</source>
            <translation>Embeddings</translation>
        </message>
        <message>
            <source>Long documents</source>
            <translation>Longs documents</translation>
        </message>
        <message>
            <source>Many languages</source>
            <translation>Nombreuses langues</translation>
        </message>
        <message>
            <source>{0} B parameters, {1} B for each token</source>
            <translation>{0} Md de paramètres, {1} Md par token</translation>
        </message>
        <message>
            <source>{0} B</source>
            <translation>{0} Md</translation>
        </message>
        <message>
            <source>gated</source>
            <translation>accès restreint</translation>
        </message>
        <message>
            <source>{0} downloads</source>
            <translation>{0} téléchargements</translation>
        </message>
        <message>
            <source>{0} M</source>
            <translation>{0} M</translation>
        </message>
        <message>
            <source>{0} k</source>
            <translation>{0} k</translation>
        </message>
    </context>
    <context>
        <name>ModelsPage</name>
        <message>
            <source>Models</source>
            <translation>Modèles</translation>
        </message>
        <message>
            <source>Folders…</source>
            <translation>Dossiers…</translation>
        </message>
        <message>
            <source>Import…</source>
            <translation>Importer…</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>It frees {0} once the trash is emptied. Its converted weights are deleted.</source>
            <translation>Cela libère {0} une fois la corbeille vidée. Ses poids convertis sont supprimés.</translation>
        </message>
        <message>
            <source>This is the copy in {0}. The one in {1} stays, and is listed instead.</source>
            <translation>Ceci est la copie de {0}. Celle de {1} reste, et est listée à la place.</translation>
        </message>
        <message>
            <source>Move {0} to the trash?</source>
            <translation>Mettre {0} à la corbeille ?</translation>
        </message>
        <message>
            <source>Move to the trash</source>
            <translation>Mettre à la corbeille</translation>
        </message>
        <message>
            <source>Load {0} anyway?</source>
            <translation>Charger {0} quand même ?</translation>
        </message>
        <message>
            <source>Download {0} and load it</source>
            <translation>Télécharger {0} et le charger</translation>
        </message>
        <message>
            <source>{0} is being downloaded; it goes on when you leave this page.</source>
            <translation>{0} est en cours de téléchargement ; cela continue quand vous quittez cette page.</translation>
        </message>
        <message>
            <source>{0} is on this PC now.</source>
            <translation>{0} est maintenant sur ce PC.</translation>
        </message>
        <message>
            <source>Load it</source>
            <translation>Le charger</translation>
        </message>
        <message>
            <source>Folder to move it to</source>
            <translation>Dossier de destination</translation>
        </message>
        <message>
            <source>Folder for the copy</source>
            <translation>Dossier de la copie</translation>
        </message>
        <message>
            <source>Search the hub</source>
            <translation>Rechercher dans le hub</translation>
        </message>
        <message>
            <source>Import a model</source>
            <translation>Importer un modèle</translation>
        </message>
    </context>
    <context>
        <name>MonitorPage</name>
        <message>
            <source>Monitor</source>
            <translation>Moniteur</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>Back to live</source>
            <translation>Retour au direct</translation>
        </message>
        <message>
            <source>Hide lanes and figures</source>
            <translation>Masquer les pistes et les chiffres</translation>
        </message>
        <message>
            <source>Show lanes, caches and memory in detail</source>
            <translation>Afficher le détail : pistes, caches et mémoire</translation>
        </message>
        <message>
            <source>A recorded session: {0}.</source>
            <translation>Une session enregistrée : {0}.</translation>
        </message>
        <message>
            <source>It ends early; everything intact is shown.</source>
            <translation>Elle se termine trop tôt ; tout ce qui est intact est affiché.</translation>
        </message>
        <message>
            <source>Compared with</source>
            <translation>Comparé à</translation>
        </message>
    </context>
    <context>
        <name>NewJob</name>
        <message>
            <source>No model is loaded.</source>
            <translation>Aucun modèle n’est chargé.</translation>
        </message>
        <message>
            <source>The job starts when a model is loaded.</source>
            <translation>La tâche démarre quand un modèle est chargé.</translation>
        </message>
        <message>
            <source>A trial of the first rows says how long a row takes there, and what it costs.</source>
            <translation>Un essai des premières lignes indique combien de temps une ligne y prend, et ce qu’elle coûte.</translation>
        </message>
        <message>
            <source>Each node plans for itself; how fast it is shows when rows are answered.</source>
            <translation>Chaque nœud planifie pour lui-même ; sa vitesse apparaît quand les lignes reçoivent leur réponse.</translation>
        </message>
    </context>
    <context>
        <name>NumbersCard</name>
        <message>
            <source>Measurements</source>
            <translation>Mesures</translation>
        </message>
        <message>
            <source>Not measured yet. Numbers with “about” are assumed, from data sheets of similar hardware; measuring takes ten seconds.</source>
            <translation>Pas encore mesuré. Les chiffres avec « environ » sont supposés, d’après les fiches techniques de matériel comparable ; mesurer prend dix secondes.</translation>
        </message>
        <message>
            <source>quick</source>
            <translation>rapide</translation>
        </message>
        <message>
            <source>thorough</source>
            <translation>approfondie</translation>
        </message>
        <message>
            <source>Measured on {0}, {1}. The best of each kind:</source>
            <translation>Mesuré le {0}, {1}. Le meilleur de chaque type :</translation>
        </message>
        <message>
            <source>Skipped: {0} ({1}).</source>
            <translation>Omis : {0} ({1}).</translation>
        </message>
        <message>
            <source>{0} varied by {1}% in every repeat.</source>
            <translation>{0} a varié de {1} % à chaque répétition.</translation>
        </message>
        <message>
            <source>Each is measured several times; the best of each kind so far:</source>
            <translation>Chacun est mesuré plusieurs fois ; le meilleur de chaque type jusqu’ici :</translation>
        </message>
        <message>
            <source>Numbers appear here as they are measured.</source>
            <translation>Les chiffres apparaissent ici à mesure qu’ils sont mesurés.</translation>
        </message>
    </context>
    <context>
        <name>OfferView</name>
        <message>
            <source>≈ Size from the catalogue, not checked with the hub.</source>
            <translation>≈ Taille du catalogue, non vérifiée auprès du hub.</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>Télécharger</translation>
        </message>
        <message>
            <source>All files…</source>
            <translation>Tous les fichiers…</translation>
        </message>
        <message>
            <source>All files of {0}</source>
            <translation>Tous les fichiers de {0}</translation>
        </message>
    </context>
    <context>
        <name>OnThisPcCard</name>
        <message>
            <source>On this PC</source>
            <translation>Sur ce PC</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modèle</translation>
        </message>
        <message>
            <source>From</source>
            <translation>De</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>Taille</translation>
        </message>
        <message>
            <source>Precision</source>
            <translation>Précision</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>Tokens/s</translation>
        </message>
        <message>
            <source>Used</source>
            <translation>Utilisé</translation>
        </message>
        <message>
            <source>What a model can do</source>
            <translation>Ce qu'un modèle sait faire</translation>
        </message>
        <message>
            <source>Any ability</source>
            <translation>Toutes les capacités</translation>
        </message>
        <message>
            <source>Models on this PC</source>
            <translation>Modèles sur ce PC</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>Charger</translation>
        </message>
        <message>
            <source>Unload</source>
            <translation>Décharger</translation>
        </message>
        <message>
            <source>Set as default</source>
            <translation>Définir par défaut</translation>
        </message>
        <message>
            <source>More</source>
            <translation>Plus</translation>
        </message>
        <message>
            <source>Verify files</source>
            <translation>Vérifier les fichiers</translation>
        </message>
        <message>
            <source>Show in folder</source>
            <translation>Afficher dans le dossier</translation>
        </message>
        <message>
            <source>Move to another folder…</source>
            <translation>Déplacer vers un autre dossier…</translation>
        </message>
        <message>
            <source>Export a copy…</source>
            <translation>Exporter une copie…</translation>
        </message>
        <message>
            <source>Remove…</source>
            <translation>Supprimer…</translation>
        </message>
        <message>
            <source>No model is here yet: take one that suits this PC.</source>
            <translation>Il n’y a pas encore de modèle ici : prenez-en un qui convient à ce PC.</translation>
        </message>
        <message>
            <source>No model here can do that.</source>
            <translation>Aucun modèle ici ne porte cette marque.</translation>
        </message>
        <message>
            <source>1 model</source>
            <translation>1 modèle</translation>
        </message>
        <message numerus="yes">
            <source>{0} models</source>
            <translation>
                <numerusform>{0} modèle</numerusform>
                <numerusform>{0} modèles</numerusform>
            </translation>
        </message>
        <message>
            <source>Default</source>
            <translation>Par défaut</translation>
        </message>
        <message>
            <source>Delete converted weights ({0})</source>
            <translation>Supprimer les poids convertis ({0})</translation>
        </message>
        <message>
            <source>Unload it first.</source>
            <translation>Déchargez-le d’abord.</translation>
        </message>
        <message>
            <source>It is used where it lies: remove it there.</source>
            <translation>Il est utilisé là où il se trouve : supprimez-le là-bas.</translation>
        </message>
    </context>
    <context>
        <name>OtherProgramsCard</name>
        <message>
            <source>How programs reach it</source>
            <translation>Comment les programmes l’atteignent</translation>
        </message>
        <message>
            <source>Copy address</source>
            <translation>Copier l’adresse</translation>
        </message>
        <message>
            <source>Address</source>
            <translation>Adresse</translation>
        </message>
        <message>
            <source>Show</source>
            <translation>Afficher</translation>
        </message>
        <message>
            <source>Show the key</source>
            <translation>Afficher la clé</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>Copier</translation>
        </message>
        <message>
            <source>Copy the key</source>
            <translation>Copier la clé</translation>
        </message>
        <message>
            <source>New key</source>
            <translation>Nouvelle clé</translation>
        </message>
        <message>
            <source>Free</source>
            <translation>Libérer</translation>
        </message>
        <message>
            <source>Models asked for by name</source>
            <translation>Modèles demandés par leur nom</translation>
        </message>
        <message>
            <source>Copy example</source>
            <translation>Copier l’exemple</translation>
        </message>
        <message>
            <source>OpenAI's interface is at /v1; programs for Anthropic or Ollama take the address alone.</source>
            <translation>L’interface d’OpenAI est à /v1 ; les programmes pour Anthropic ou Ollama prennent l’adresse seule.</translation>
        </message>
        <message>
            <source>Example</source>
            <translation>Exemple</translation>
        </message>
        <message>
            <source>Requests</source>
            <translation>Requêtes</translation>
        </message>
        <message>
            <source>Key</source>
            <translation>Clé</translation>
        </message>
        <message>
            <source>Off. Nothing listens, and no editor, agent or other app can ask.</source>
            <translation>Désactivé. Rien n’écoute, et aucun éditeur, agent ou autre programme ne peut demander.</translation>
        </message>
        <message>
            <source>Starting…</source>
            <translation>Démarrage…</translation>
        </message>
        <message>
            <source>On, for all models on this PC. Chats in this window come first.</source>
            <translation>Activé, pour tous les modèles de ce PC. Les discussions de cette fenêtre passent en premier.</translation>
        </message>
        <message>
            <source>Off, because of a problem.</source>
            <translation>Désactivé, à cause d’un problème.</translation>
        </message>
        <message>
            <source>No other PC can reach it. Any program here can.</source>
            <translation>Aucun autre PC ne peut l’atteindre. Tout programme d’ici le peut.</translation>
        </message>
        <message>
            <source>No other PC can reach it. Programs here need the key.</source>
            <translation>Aucun autre PC ne peut l’atteindre. Les programmes d’ici ont besoin de la clé.</translation>
        </message>
        <message>
            <source>What is asked and answered crosses your network unencrypted: use it only at home.</source>
            <translation>Questions et réponses traversent votre réseau sans chiffrement : à n’utiliser que chez vous.</translation>
        </message>
        <message>
            <source>{0} is being loaded.</source>
            <translation>{0} est en cours de chargement.</translation>
        </message>
        <message>
            <source>{0} is loaded.</source>
            <translation>{0} est chargé.</translation>
        </message>
        <message>
            <source>Any model on this PC: it is loaded beside yours, one at a time.</source>
            <translation>N’importe quel modèle de ce PC : il est chargé à côté du vôtre, un à la fois.</translation>
        </message>
        <message>
            <source>In the system's keyring.</source>
            <translation>Dans le trousseau du système.</translation>
        </message>
        <message>
            <source>For this run only: this system has no keyring.</source>
            <translation>Jusqu’à la fermeture seulement : ce système n’a pas de trousseau.</translation>
        </message>
        <message>
            <source>Since the window opened; what was asked and answered is not kept.</source>
            <translation>Depuis l’ouverture de la fenêtre ; les questions et réponses ne sont pas conservées.</translation>
        </message>
        <message>
            <source>None yet.</source>
            <translation>Aucune pour l’instant.</translation>
        </message>
    </context>
    <context>
        <name>OutputCard</name>
        <message>
            <source>Result file</source>
            <translation>Fichier de résultat</translation>
        </message>
        <message>
            <source>Name of the result file</source>
            <translation>Nom du fichier de résultat</translation>
        </message>
        <message>
            <source>File type</source>
            <translation>Type de fichier</translation>
        </message>
        <message>
            <source>Another folder…</source>
            <translation>Autre dossier…</translation>
        </message>
        <message>
            <source>In</source>
            <translation>Dans</translation>
        </message>
        <message>
            <source>In OpenAI's output format; rows that fail go into an error file beside it.</source>
            <translation>Au format de sortie d’OpenAI ; les lignes en échec vont dans un fichier d’erreurs à côté.</translation>
        </message>
        <message>
            <source>Keeps the input's columns; adds the answer, how it ended, token counts and, for failed rows, why.</source>
            <translation>Garde les colonnes d’origine ; ajoute la réponse, comment elle s’est terminée, les nombres de tokens et, pour les lignes en échec, la raison.</translation>
        </message>
        <message>
            <source>Name the result file.</source>
            <translation>Donnez un nom au fichier de résultat.</translation>
        </message>
        <message>
            <source>The result file's name contains a slash: choose the folder beside it instead.</source>
            <translation>Le nom du fichier de résultat contient une barre oblique : choisissez plutôt le dossier à côté.</translation>
        </message>
        <message>
            <source>Folder of the result file</source>
            <translation>Dossier du fichier de résultat</translation>
        </message>
    </context>
    <context>
        <name>Pages</name>
        <message>
            <source>Chat</source>
            <translation>Discussion</translation>
        </message>
        <message>
            <source>Batch</source>
            <translation>Lots</translation>
        </message>
        <message>
            <source>Monitor</source>
            <translation>Moniteur</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>Optimiser</translation>
        </message>
        <message>
            <source>Models</source>
            <translation>Modèles</translation>
        </message>
        <message>
            <source>Settings</source>
            <translation>Paramètres</translation>
        </message>
        <message>
            <source>Choose a first model</source>
            <translation>Choisir un premier modèle</translation>
        </message>
    </context>
    <context>
        <name>PassageDialog</name>
        <message>
            <source>Source {0}</source>
            <translation>Source {0}</translation>
        </message>
        <message>
            <source>Document</source>
            <translation>Document</translation>
        </message>
        <message>
            <source>The passage and what stands around it</source>
            <translation>Le passage et ce qui l’entoure</translation>
        </message>
        <message>
            <source>Looking for the passage…</source>
            <translation>Recherche du passage…</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>This passage is no longer there: the document has changed or was removed since.</source>
            <translation>Ce passage n’existe plus : le document a été modifié ou supprimé depuis.</translation>
        </message>
    </context>
    <context>
        <name>PictureRow</name>
        <message>
            <source>Remove picture {0}</source>
            <translation>Retirer l’image {0}</translation>
        </message>
        <message>
            <source>damaged picture</source>
            <translation>image endommagée</translation>
        </message>
        <message>
            <source>Picture {0} of {1}</source>
            <translation>Image {0} sur {1}</translation>
        </message>
        <message>
            <source>{0}, {1} by {2} pixels</source>
            <translation>{0}, {1} par {2} pixels</translation>
        </message>
    </context>
    <context>
        <name>Pictures</name>
        <message>
            <source>A message takes up to {0} pictures.</source>
            <translation>Un message accepte jusqu’à {0} images.</translation>
        </message>
        <message>
            <source>A chat takes {0} of pictures: start a new chat for more.</source>
            <translation>Une discussion accepte {0} d’images : commencez-en une nouvelle pour en ajouter.</translation>
        </message>
        <message>
            <source>{0} is not a file.</source>
            <translation>{0} n’est pas un fichier.</translation>
        </message>
        <message>
            <source>{0} cannot be read ({1}).</source>
            <translation>{0} ne peut pas être lu ({1}).</translation>
        </message>
        <message>
            <source>{0} is larger than {1}: make it smaller first.</source>
            <translation>{0} dépasse {1} : réduisez d’abord sa taille.</translation>
        </message>
        <message>
            <source>{0} is damaged and cannot be shown.</source>
            <translation>{0} est endommagé et ne peut pas être affiché.</translation>
        </message>
        <message>
            <source>{0} is in the {1} format, which is not read here: save it as PNG or JPEG.</source>
            <translation>{0} est au format {1}, qui n'est pas lu ici : enregistrez l'image en PNG ou JPEG.</translation>
        </message>
        <message>
            <source>{0} is not a PNG, JPEG, WebP or GIF picture.</source>
            <translation>{0} n’est pas une image PNG, JPEG, WebP ou GIF.</translation>
        </message>
        <message>
            <source>{0} has too many pixels: make it smaller first.</source>
            <translation>{0} a trop de pixels : réduisez d’abord sa taille.</translation>
        </message>
    </context>
    <context>
        <name>PlaceRows</name>
        <message>
            <source>Who answers the rows</source>
            <translation>Qui répond aux lignes</translation>
        </message>
        <message>
            <source>1 row</source>
            <translation>1 ligne</translation>
        </message>
        <message numerus="yes">
            <source>{0} rows</source>
            <translation>
                <numerusform>{0} ligne</numerusform>
                <numerusform>{0} lignes</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>PlacesCard</name>
        <message>
            <source>Answered by</source>
            <translation>Réponses de</translation>
        </message>
        <message>
            <source>Ask two for slow last rows</source>
            <translation>Demander à deux pour les dernières lignes lentes</translation>
        </message>
        <message>
            <source>Near the end, a row that one server is slow with is asked of another as well, which costs tokens.</source>
            <translation>Vers la fin, une ligne qui prend du temps sur un serveur est aussi confiée à un autre, ce qui coûte des tokens.</translation>
        </message>
        <message>
            <source>Add a column that says who answered</source>
            <translation>Ajouter une colonne indiquant qui a répondu</translation>
        </message>
        <message>
            <source>A Ray cluster at</source>
            <translation>Un cluster Ray à</translation>
        </message>
        <message>
            <source>Each of its nodes answers rows with the model that is loaded here.</source>
            <translation>Chacun de ses nœuds répond aux lignes avec le modèle chargé ici.</translation>
        </message>
        <message>
            <source>Address of the Ray cluster</source>
            <translation>Adresse du cluster Ray</translation>
        </message>
        <message>
            <source>auto, or 10.0.0.5:6379</source>
            <translation>auto, ou 10.0.0.5:6379</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>Ce PC</translation>
        </message>
        <message>
            <source>Give the address of the Ray cluster, or auto for the one of this PC.</source>
            <translation>Indiquez l’adresse du cluster Ray, ou auto pour celui de ce PC.</translation>
        </message>
        <message>
            <source>Choose who answers the rows.</source>
            <translation>Choisissez qui répond aux lignes.</translation>
        </message>
    </context>
    <context>
        <name>PlanBars</name>
        <message>
            <source>experts, {0} slots</source>
            <translation>experts, {0} emplacements</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>experts</translation>
        </message>
        <message>
            <source>model</source>
            <translation>modèle</translation>
        </message>
        <message>
            <source>loading buffers</source>
            <translation>tampons de chargement</translation>
        </message>
        <message>
            <source>chat memory</source>
            <translation>mémoire de discussion</translation>
        </message>
        <message>
            <source>working memory</source>
            <translation>mémoire de travail</translation>
        </message>
        <message>
            <source>reading pictures</source>
            <translation>lecture d'images</translation>
        </message>
        <message>
            <source>safety margin</source>
            <translation>marge de sécurité</translation>
        </message>
        <message>
            <source>other programs</source>
            <translation>autres programmes</translation>
        </message>
        <message>
            <source>Memory by tier</source>
            <translation>Mémoire par niveau</translation>
        </message>
        <message>
            <source>under {0}</source>
            <translation>moins de {0}</translation>
        </message>
        <message>
            <source>free</source>
            <translation>libre</translation>
        </message>
        <message>
            <source>{0} GB</source>
            <translation>{0} Go</translation>
        </message>
        <message>
            <source>{0} of {1} GB</source>
            <translation>{0} sur {1} Go</translation>
        </message>
    </context>
    <context>
        <name>PlanCard</name>
        <message>
            <source>Plan</source>
            <translation>Plan</translation>
        </message>
        <message>
            <source>Planning…</source>
            <translation>Planification…</translation>
        </message>
        <message>
            <source>{0} {1}: {2}</source>
            <translation>{0} {1} : {2}</translation>
        </message>
        <message>
            <source>Alternatives, in tokens/s: {0}.</source>
            <translation>Alternatives, en tokens/s : {0}.</translation>
        </message>
        <message>
            <source>Plan for {0}</source>
            <translation>Plan pour {0}</translation>
        </message>
    </context>
    <context>
        <name>PlanTable</name>
        <message>
            <source>Plan</source>
            <translation>Plan</translation>
        </message>
        <message>
            <source>Predicted</source>
            <translation>Prévu</translation>
        </message>
        <message>
            <source>Timed</source>
            <translation>Mesuré</translation>
        </message>
        <message>
            <source>Tokens/s</source>
            <translation>Tokens/s</translation>
        </message>
        <message>
            <source>predicted {0} tokens/s ({1} to {2})</source>
            <translation>prévu {0} tokens/s ({1} à {2})</translation>
        </message>
        <message>
            <source>timed {0} tokens/s</source>
            <translation>mesuré {0} tokens/s</translation>
        </message>
        <message>
            <source>{2} runs from {0} to {1}</source>
            <translation>{2} essais de {0} à {1}</translation>
        </message>
        <message>
            <source>first token after {0} s</source>
            <translation>premier token après {0} s</translation>
        </message>
        <message>
            <source>winner</source>
            <translation>gagnant</translation>
        </message>
        <message>
            <source>the plan</source>
            <translation>le plan</translation>
        </message>
        <message>
            <source>as it ran before</source>
            <translation>comme avant</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>échec</translation>
        </message>
    </context>
    <context>
        <name>PoliciesCard</name>
        <message>
            <source>Policies</source>
            <translation>Stratégies</translation>
        </message>
        <message>
            <source>Cache policies</source>
            <translation>Stratégies de cache</translation>
        </message>
        <message>
            <source>When the cache is full, a policy decides which expert to evict for the next one. Each is tested on the model's actual requests; its share of hits (experts found in the cache) shows how well it would do.</source>
            <translation>Quand le cache est plein, une stratégie décide quel expert évincer pour le suivant. Chacune est testée sur les vraies requêtes du modèle ; sa part de succès (experts trouvés dans le cache) montre ce qu’elle vaudrait.</translation>
        </message>
        <message>
            <source>recent hit rate, each on its own</source>
            <translation>taux de succès récent, chacune à part</translation>
        </message>
        <message>
            <source>All are simulated on the live routing; the one with the most hits is adopted.</source>
            <translation>Toutes sont simulées sur le routage en cours ; celle qui a le plus de succès est adoptée.</translation>
        </message>
        <message>
            <source>The policy is set in the settings; the others are simulated.</source>
            <translation>La stratégie est fixée dans les paramètres ; les autres sont simulées.</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
        <message>
            <source>{0} in use</source>
            <translation>{0} utilisée</translation>
        </message>
    </context>
    <context>
        <name>PredictButton</name>
        <message>
            <source>Predicted</source>
            <translation>Prévu</translation>
        </message>
        <message>
            <source>The simulator's prediction for this request, below the recording</source>
            <translation>La prévision du simulateur pour cette requête, sous l’enregistrement</translation>
        </message>
        <message>
            <source>Show the predicted timeline</source>
            <translation>Afficher la chronologie prévue</translation>
        </message>
        <message>
            <source>Nothing to predict yet: ask something in Chat first.</source>
            <translation>Rien à prévoir pour l’instant : posez d’abord une question dans Discussion.</translation>
        </message>
        <message>
            <source>the model's files could not be read</source>
            <translation>les fichiers du modèle n’ont pas pu être lus</translation>
        </message>
        <message>
            <source>No prediction: {0}</source>
            <translation>Pas de prévision : {0}</translation>
        </message>
    </context>
    <context>
        <name>Predicted</name>
        <message>
            <source>{0} tokens/s predicted</source>
            <translation>{0} tokens/s prévus</translation>
        </message>
        <message>
            <source>{0} measured</source>
            <translation>{0} mesurés</translation>
        </message>
        <message>
            <source>first token after {0}</source>
            <translation>premier token après {0}</translation>
        </message>
        <message>
            <source>Simulated for {0} tokens read and {1} written, aligned at the same step.</source>
            <translation>Simulé pour {0} tokens lus et {1} écrits, aligné sur la même étape.</translation>
        </message>
        <message>
            <source>Measured here: {0}.</source>
            <translation>Mesuré ici : {0}.</translation>
        </message>
        <message>
            <source>From data sheets, not measured by Tune: {0}.</source>
            <translation>D’après les fiches techniques, non mesuré par Optimiser : {0}.</translation>
        </message>
        <message>
            <source>Assumed: typical expert popularity, so that {0} slots hit {1}%;</source>
            <translation>Supposé : popularité typique des experts, de sorte que {0} emplacements donnent {1} % de succès ;</translation>
        </message>
        <message>
            <source>Assumed: typical expert popularity;</source>
            <translation>Supposé : popularité typique des experts ;</translation>
        </message>
        <message>
            <source>no other program is running.</source>
            <translation>aucun autre programme en cours.</translation>
        </message>
        <message>
            <source>processor and RAM</source>
            <translation>processeur et RAM</translation>
        </message>
        <message>
            <source>graphics card</source>
            <translation>carte graphique</translation>
        </message>
        <message>
            <source>PCIe</source>
            <translation>PCIe</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>disque</translation>
        </message>
    </context>
    <context>
        <name>PredictionCard</name>
        <message>
            <source>Prefetching</source>
            <translation>Préchargement</translation>
        </message>
        <message>
            <source>Prefetching copies experts before they are needed, guessing which will be. A right guess saves a miss, a wait for memory; a wrong one costs a useless copy.</source>
            <translation>Le préchargement copie des experts avant qu’on en ait besoin, en devinant lesquels. Une bonne prédiction évite un défaut, donc une attente de la mémoire ; une mauvaise coûte une copie inutile.</translation>
        </message>
        <message>
            <source>In use: {0}, one layer ahead.</source>
            <translation>Utilisé : {0}, une couche d’avance.</translation>
        </message>
        <message numerus="yes">
            <source>In use: {0}, {1} layers ahead.</source>
            <translation>
                <numerusform>Utilisé : {0}, {1} couche d’avance.</numerusform>
                <numerusform>Utilisé : {0}, {1} couches d’avance.</numerusform>
            </translation>
        </message>
        <message>
            <source>None is in use: no predictor would save more than it costs.</source>
            <translation>Aucun n’est utilisé : aucun prédicteur ne ferait gagner plus qu’il ne coûte.</translation>
        </message>
        <message>
            <source>Nothing is predicted on this model and machine: experts are fetched on a miss.</source>
            <translation>Rien n’est prédit avec ce modèle et cette machine : les experts sont transférés en cas de défaut.</translation>
        </message>
        <message>
            <source>Predictor</source>
            <translation>Prédicteur</translation>
        </message>
        <message>
            <source>predicted</source>
            <translation>prévu</translation>
        </message>
        <message>
            <source>right</source>
            <translation>justes</translation>
        </message>
        <message>
            <source>gain</source>
            <translation>gain</translation>
        </message>
        <message>
            <source>{0} ms</source>
            <translation>{0} ms</translation>
        </message>
        <message>
            <source>Share of the missing experts that was predicted</source>
            <translation>Part des experts manquants qui était prédite</translation>
        </message>
        <message>
            <source>Share of the predicted, missing experts that was needed</source>
            <translation>Part des experts prédits et manquants qui a servi</translation>
        </message>
        <message>
            <source>Milliseconds its use would save per step, net of its cost</source>
            <translation>Millisecondes qu’il ferait gagner par étape, coût déduit</translation>
        </message>
        <message>
            <source>used</source>
            <translation>utilisés</translation>
        </message>
        <message>
            <source>wasted</source>
            <translation>inutiles</translation>
        </message>
        <message>
            <source>{0}: of {1} prefetched, {2} used, {3} wasted (hatched), the rest waits.</source>
            <translation>{0} : sur {1} préchargés, {2} utilisés, {3} inutiles (hachurés), le reste attend.</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
    </context>
    <context>
        <name>ProgressCard</name>
        <message>
            <source>Job progress</source>
            <translation>Progression de la tâche</translation>
        </message>
    </context>
    <context>
        <name>PromptPopover</name>
        <message>
            <source>Saved prompts</source>
            <translation>Prompts enregistrés</translation>
        </message>
        <message>
            <source>Find a prompt</source>
            <translation>Trouver un prompt</translation>
        </message>
        <message>
            <source>/</source>
            <translation>/</translation>
        </message>
        <message>
            <source>Saved prompts, in an empty message</source>
            <translation>Prompts enregistrés, dans un message vide</translation>
        </message>
        <message>
            <source>Save this message…</source>
            <translation>Enregistrer ce message…</translation>
        </message>
        <message>
            <source>New…</source>
            <translation>Nouveau…</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>Modifier…</translation>
        </message>
        <message>
            <source>Delete</source>
            <translation>Supprimer</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>No saved prompt has these words.</source>
            <translation>Aucun prompt enregistré ne contient ces mots.</translation>
        </message>
        <message>
            <source>Nothing is saved yet. A saved prompt is a message to use again; where it says {{topic}}, you are asked for the topic each time.</source>
            <translation>Rien n’est encore enregistré. Un prompt enregistré est un message à réutiliser ; là où il contient {{topic}}, la valeur de « topic » vous est demandée à chaque fois.</translation>
        </message>
        <message>
            <source>Insert</source>
            <translation>Insérer</translation>
        </message>
        <message>
            <source>Back</source>
            <translation>Retour</translation>
        </message>
        <message>
            <source>Name of the prompt</source>
            <translation>Nom du prompt</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>Nom</translation>
        </message>
        <message>
            <source>Prompt</source>
            <translation>Prompt</translation>
        </message>
        <message>
            <source>Summarise {{text}} in {{number}} sentences.</source>
            <translation>Résume {{text}} en {{number}} phrases.</translation>
        </message>
        <message>
            <source>A name between double braces, such as {{topic}}, is asked for each time.</source>
            <translation>Un nom entre doubles accolades, comme {{topic}}, est demandé à chaque fois.</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>Enregistrer</translation>
        </message>
        <message>
            <source>Another prompt has this name: saving replaces it.</source>
            <translation>Un autre prompt porte ce nom : l’enregistrement le remplacera.</translation>
        </message>
    </context>
    <context>
        <name>QuickPrompt</name>
        <message>
            <source>Quick question</source>
            <translation>Question rapide</translation>
        </message>
        <message>
            <source>Ask something</source>
            <translation>Posez une question</translation>
        </message>
        <message>
            <source>Question</source>
            <translation>Question</translation>
        </message>
        <message>
            <source>Enter asks, Shift+Enter starts a new line, Esc closes</source>
            <translation>Entrée demande, Maj+Entrée commence une nouvelle ligne, Échap ferme</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>Réponse</translation>
        </message>
        <message>
            <source>Open in Switchyard</source>
            <translation>Ouvrir dans Switchyard</translation>
        </message>
        <message>
            <source>The server that answers new chats is not in the list: choose another model.</source>
            <translation>Le serveur qui répond aux nouvelles discussions n’est pas dans la liste : choisissez un autre modèle.</translation>
        </message>
        <message>
            <source>This would go to {0}: send a chat there from Switchyard first.</source>
            <translation>Ceci irait à {0} : envoyez-y d’abord une discussion depuis Switchyard.</translation>
        </message>
        <message>
            <source>Waiting for the answer…</source>
            <translation>En attente de la réponse…</translation>
        </message>
        <message>
            <source>Thinking…</source>
            <translation>Réflexion…</translation>
        </message>
        <message>
            <source>The engine is not running: open Switchyard to restart it.</source>
            <translation>Le moteur n’est pas en marche : ouvrez Switchyard pour le redémarrer.</translation>
        </message>
        <message>
            <source>No model is loaded: open Switchyard to choose one.</source>
            <translation>Aucun modèle n’est chargé : ouvrez Switchyard pour en choisir un.</translation>
        </message>
        <message>
            <source>The model is loading; the answer follows.</source>
            <translation>Le modèle se charge ; la réponse suivra.</translation>
        </message>
        <message>
            <source>Waiting for another answer…</source>
            <translation>En attente d’une autre réponse…</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>Arrêter</translation>
        </message>
        <message>
            <source>Ask</source>
            <translation>Demander</translation>
        </message>
    </context>
    <context>
        <name>RaceCard</name>
        <message>
            <source>Timed on the real engine</source>
            <translation>Chronométré sur le vrai moteur</translation>
        </message>
        <message>
            <source>Nothing timed yet: “Tune” times the best plans and the current settings with real tokens.</source>
            <translation>Rien n’est encore chronométré : « Optimiser » mesure les meilleurs plans et les réglages actuels avec de vrais tokens.</translation>
        </message>
        <message>
            <source>Use winner now</source>
            <translation>Utiliser le gagnant</translation>
        </message>
        <message>
            <source>Keep as before</source>
            <translation>Garder comme avant</translation>
        </message>
        <message>
            <source>Bars: measured, which is what counts. Brackets: the predicted range.</source>
            <translation>Barres : mesuré, c’est ce qui compte. Crochets : la plage prévue.</translation>
        </message>
        <message>
            <source>{0}, {1}</source>
            <translation>{0}, {1}</translation>
        </message>
        <message>
            <source>Before {0} → after {1} tokens/s</source>
            <translation>Avant {0} → après {1} tokens/s</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} tokens/s</translation>
        </message>
        <message>
            <source>This model now runs with it: {0}, {1} tokens/s.</source>
            <translation>Ce modèle tourne maintenant avec : {0}, {1} tokens/s.</translation>
        </message>
        <message>
            <source>This model has since run at {0} tokens/s, much faster than the {1} timed here: the machine was busy then. Plans no longer use these figures. Tune again.</source>
            <translation>Ce modèle a depuis tourné à {0} tokens/s, bien plus vite que les {1} mesurés ici : la machine était alors occupée. Les plans n’utilisent plus ces chiffres. Optimisez de nouveau.</translation>
        </message>
        <message>
            <source>Other programs used {0}% of the CPU while this was timed: every figure is too low, and the wrong plan may have won. Plans do not use these figures. Tune again when those programs have finished.</source>
            <translation>D’autres programmes ont utilisé {0} % du processeur pendant la mesure : tous les chiffres sont trop bas, et le mauvais plan a peut-être gagné. Les plans n’utilisent pas ces chiffres. Optimisez de nouveau quand ces programmes auront fini.</translation>
        </message>
    </context>
    <context>
        <name>RaceDelegate</name>
        <message>
            <source>waits</source>
            <translation>attend</translation>
        </message>
    </context>
    <context>
        <name>RaceView</name>
        <message>
            <source>Plans, predicted and measured</source>
            <translation>Plans, prévus et mesurés</translation>
        </message>
    </context>
    <context>
        <name>RangeBar</name>
        <message>
            <source>10 s</source>
            <translation>10 s</translation>
        </message>
        <message>
            <source>Show 10 seconds</source>
            <translation>Afficher 10 secondes</translation>
        </message>
        <message>
            <source>60 s</source>
            <translation>60 s</translation>
        </message>
        <message>
            <source>Show 60 seconds</source>
            <translation>Afficher 60 secondes</translation>
        </message>
        <message>
            <source>5 min</source>
            <translation>5 min</translation>
        </message>
        <message>
            <source>Show 5 minutes</source>
            <translation>Afficher 5 minutes</translation>
        </message>
        <message>
            <source>Session</source>
            <translation>Session</translation>
        </message>
        <message>
            <source>Show the whole session</source>
            <translation>Afficher toute la session</translation>
        </message>
        <message>
            <source>Freeze</source>
            <translation>Figer</translation>
        </message>
        <message>
            <source>Frozen</source>
            <translation>Figé</translation>
        </message>
        <message>
            <source>Space freezes</source>
            <translation>Espace fige</translation>
        </message>
        <message>
            <source>Frozen: Home follows</source>
            <translation>Figé : Origine suit</translation>
        </message>
        <message>
            <source>Space freezes the view; recording continues</source>
            <translation>Espace fige la vue ; l’enregistrement continue</translation>
        </message>
        <message>
            <source>Home follows live data</source>
            <translation>Origine suit les données en direct</translation>
        </message>
        <message>
            <source>Freeze the view; recording continues</source>
            <translation>Figer la vue ; l’enregistrement continue</translation>
        </message>
        <message>
            <source>Follow live data</source>
            <translation>Suivre les données en direct</translation>
        </message>
    </context>
    <context>
        <name>RecommendationList</name>
        <message>
            <source>≈ Size from the catalogue, not checked with the hub.</source>
            <translation>≈ Taille du catalogue, non vérifiée auprès du hub.</translation>
        </message>
    </context>
    <context>
        <name>RecommendationRow</name>
        <message>
            <source>Download</source>
            <translation>Télécharger</translation>
        </message>
    </context>
    <context>
        <name>Recommendations</name>
        <message>
            <source>Fast</source>
            <translation>Rapide</translation>
        </message>
        <message>
            <source>Balanced</source>
            <translation>Équilibré</translation>
        </message>
        <message>
            <source>Best that fits</source>
            <translation>Le meilleur qui tienne</translation>
        </message>
        <message>
            <source>on this PC</source>
            <translation>sur ce PC</translation>
        </message>
        <message>
            <source>first answer in about {0}</source>
            <translation>première réponse dans environ {0}</translation>
        </message>
        <message>
            <source>first answer in about {0} at 100 Mbit/s</source>
            <translation>première réponse dans environ {0} à 100 Mbit/s</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>Télécharger</translation>
        </message>
        <message>
            <source>Downloading</source>
            <translation>Téléchargement</translation>
        </message>
        <message>
            <source>Load</source>
            <translation>Charger</translation>
        </message>
    </context>
    <context>
        <name>Report</name>
        <message>
            <source>Save a report</source>
            <translation>Enregistrer un rapport</translation>
        </message>
        <message>
            <source>Text (*.txt)</source>
            <translation>Texte (*.txt)</translation>
        </message>
    </context>
    <context>
        <name>Resizing</name>
        <message>
            <source>Requested {0} experts…</source>
            <translation>{0} experts demandés…</translation>
        </message>
        <message>
            <source>Stays at {0} experts: no room for {1}.</source>
            <translation>Reste à {0} experts : pas de place pour {1}.</translation>
        </message>
        <message>
            <source>Stays at {0} experts: {1} is not a valid size, or too few for a step.</source>
            <translation>Reste à {0} experts : {1} n’est pas une taille valide, ou trop peu pour une étape.</translation>
        </message>
        <message>
            <source>Now {0} experts, was {1}; no room for {2}.</source>
            <translation>Maintenant {0} experts, au lieu de {1} ; pas de place pour {2}.</translation>
        </message>
        <message>
            <source>Now {0} experts, was {1}.</source>
            <translation>Maintenant {0} experts, au lieu de {1}.</translation>
        </message>
        <message>
            <source>hits {0}%, was {1}%</source>
            <translation>succès {0} %, au lieu de {1} %</translation>
        </message>
        <message>
            <source>{0} tokens/s, was {1}</source>
            <translation>{0} tokens/s, au lieu de {1}</translation>
        </message>
        <message>
            <source>(predicted: {0})</source>
            <translation>(prévu : {0})</translation>
        </message>
        <message>
            <source>Measured: {0}.</source>
            <translation>Mesuré : {0}.</translation>
        </message>
    </context>
    <context>
        <name>RooflinePlot</name>
        <message>
            <source>operations per byte →</source>
            <translation>opérations par octet →</translation>
        </message>
        <message>
            <source>Roofline</source>
            <translation>Roofline</translation>
        </message>
        <message>
            <source>{0}: {1}, up to {2}</source>
            <translation>{0} : {1}, jusqu’à {2}</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>GPU over the link</source>
            <translation>GPU via la liaison</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>limited by the link to the card</source>
            <translation>limité par la liaison avec la carte</translation>
        </message>
        <message>
            <source>limited by the card's memory</source>
            <translation>limité par la mémoire de la carte</translation>
        </message>
        <message>
            <source>limited by GPU compute</source>
            <translation>limité par le calcul du GPU</translation>
        </message>
        <message>
            <source>limited by RAM</source>
            <translation>limité par la RAM</translation>
        </message>
        <message>
            <source>limited by CPU compute</source>
            <translation>limité par le calcul du processeur</translation>
        </message>
        <message>
            <source>{0}: {1} operations per byte, {2}, {3}</source>
            <translation>{0} : {1} opérations par octet, {2}, {3}</translation>
        </message>
        <message>
            <source>decode</source>
            <translation>décodage</translation>
        </message>
        <message>
            <source>prefill</source>
            <translation>préremplissage</translation>
        </message>
        <message>
            <source>batch</source>
            <translation>lots</translation>
        </message>
    </context>
    <context>
        <name>RowDetail</name>
        <message>
            <source>Prompt</source>
            <translation>Prompt</translation>
        </message>
        <message>
            <source>Reasoning</source>
            <translation>Raisonnement</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>Réponse</translation>
        </message>
        <message>
            <source>Copy</source>
            <translation>Copier</translation>
        </message>
        <message>
            <source>Copy the answer</source>
            <translation>Copier la réponse</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>Row {0}</source>
            <translation>Ligne {0}</translation>
        </message>
        <message>
            <source>{0} tokens</source>
            <translation>{0} tokens</translation>
        </message>
        <message>
            <source>Failed: the row {0}.</source>
            <translation>Échec. La ligne : {0}.</translation>
        </message>
        <message>
            <source>The input can no longer be read, or the row was not sent.</source>
            <translation>L’entrée ne peut plus être lue, ou la ligne n’a pas été envoyée.</translation>
        </message>
    </context>
    <context>
        <name>RowsCard</name>
        <message>
            <source>Finished rows</source>
            <translation>Lignes traitées</translation>
        </message>
        <message>
            <source>Row</source>
            <translation>Ligne</translation>
        </message>
        <message>
            <source>Prompt</source>
            <translation>Prompt</translation>
        </message>
        <message>
            <source>Answer</source>
            <translation>Réponse</translation>
        </message>
        <message>
            <source>End</source>
            <translation>Fin</translation>
        </message>
        <message>
            <source>Tokens</source>
            <translation>Tokens</translation>
        </message>
        <message>
            <source>Answer again with more tokens</source>
            <translation>Relancer avec plus de tokens</translation>
        </message>
        <message>
            <source>Twice as many as each of them had</source>
            <translation>Deux fois plus que ce que chacune avait</translation>
        </message>
        <message>
            <source>Latest</source>
            <translation>Dernières</translation>
        </message>
        <message>
            <source>All</source>
            <translation>Toutes</translation>
        </message>
        <message>
            <source>Failed</source>
            <translation>Échecs</translation>
        </message>
        <message>
            <source>Cut off</source>
            <translation>Tronquées</translation>
        </message>
        <message>
            <source>No row has failed.</source>
            <translation>Aucune ligne n’a échoué.</translation>
        </message>
        <message>
            <source>No row was cut off at its limit of tokens.</source>
            <translation>Aucune ligne n’a été tronquée à sa limite de tokens.</translation>
        </message>
        <message>
            <source>Rows appear here as they are answered.</source>
            <translation>Les lignes apparaissent ici à mesure qu’elles sont traitées.</translation>
        </message>
        <message>
            <source>No row has been answered yet.</source>
            <translation>Aucune ligne n’a encore été traitée.</translation>
        </message>
    </context>
    <context>
        <name>RunCard</name>
        <message>
            <source>Tuning</source>
            <translation>Optimisation</translation>
        </message>
        <message>
            <source>A model, by a few letters of its name</source>
            <translation>Un modèle, par quelques lettres de son nom</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modèle</translation>
        </message>
        <message>
            <source>A model on this PC, one of the catalogue, or a hub id such as Qwen/Qwen3-30B-A3B</source>
            <translation>Un modèle de ce PC, un du catalogue, ou un identifiant du hub tel que Qwen/Qwen3-30B-A3B</translation>
        </message>
        <message>
            <source>Quick, 10 s</source>
            <translation>Rapide, 10 s</translation>
        </message>
        <message>
            <source>Quick: measures for about ten seconds</source>
            <translation>Rapide : mesure pendant une dizaine de secondes</translation>
        </message>
        <message>
            <source>Thorough, 2 min</source>
            <translation>Approfondie, 2 min</translation>
        </message>
        <message>
            <source>Thorough: measures for about two minutes</source>
            <translation>Approfondie : mesure pendant environ deux minutes</translation>
        </message>
        <message>
            <source>Measure only</source>
            <translation>Mesurer seulement</translation>
        </message>
        <message>
            <source>Tune</source>
            <translation>Optimiser</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>Progress</source>
            <translation>Progression</translation>
        </message>
        <message>
            <source>Save anyway</source>
            <translation>Enregistrer quand même</translation>
        </message>
        <message>
            <source>Saves figures that are too low because other programs were busy</source>
            <translation>Enregistre des chiffres trop bas, car d’autres programmes étaient actifs</translation>
        </message>
        <message>
            <source>Cancelling</source>
            <translation>Annulation</translation>
        </message>
        <message>
            <source>Cancelling. The previous model is loaded again.</source>
            <translation>Annulation. Le modèle précédent est rechargé.</translation>
        </message>
        <message>
            <source>Tune again</source>
            <translation>Optimiser de nouveau</translation>
        </message>
        <message>
            <source>Only models on this PC can be timed; of this one you see a plan.</source>
            <translation>Seuls les modèles de ce PC peuvent être chronométrés ; pour celui-ci, vous voyez un plan.</translation>
        </message>
        <message>
            <source>Get it on the Models page…</source>
            <translation>L’obtenir sur la page Modèles…</translation>
        </message>
        <message>
            <source>Get another model…</source>
            <translation>Obtenir un autre modèle…</translation>
        </message>
    </context>
    <context>
        <name>RunFollowing</name>
        <message>
            <source>Waiting for the answer</source>
            <translation>En attente de la réponse</translation>
        </message>
        <message>
            <source>Waiting for the engine</source>
            <translation>En attente du moteur</translation>
        </message>
        <message>
            <source>being timed</source>
            <translation>mesure en cours</translation>
        </message>
        <message>
            <source>being loaded</source>
            <translation>chargement en cours</translation>
        </message>
        <message>
            <source>Cancelled: nothing was saved or changed.</source>
            <translation>Annulé : rien n’a été enregistré ni modifié.</translation>
        </message>
        <message>
            <source>Not saved: other programs used {0}% of the CPU, so these figures are too low. Close them or let them finish, then tune again.</source>
            <translation>Non enregistré : d’autres programmes ont utilisé {0} % du processeur, ces chiffres sont donc trop bas. Fermez-les ou laissez-les finir, puis optimisez de nouveau.</translation>
        </message>
        <message>
            <source>Saved. Loading the model with it.</source>
            <translation>Enregistré. Le modèle est chargé avec.</translation>
        </message>
    </context>
    <context>
        <name>RunningJobGuard</name>
        <message>
            <source>A batch job is running.</source>
            <translation>Une tâche par lots est en cours.</translation>
        </message>
        <message>
            <source>It stops with the window. No answered row is lost: you can resume it at the next start.</source>
            <translation>Elle s’arrête avec la fenêtre. Aucune ligne traitée n’est perdue : vous pourrez la reprendre au prochain démarrage.</translation>
        </message>
        <message>
            <source>Stop it and close</source>
            <translation>L’arrêter et fermer</translation>
        </message>
        <message numerus="yes">
            <source>{0} batch jobs are running.</source>
            <translation>
                <numerusform>{0} tâche par lots est en cours.</numerusform>
                <numerusform>{0} tâches par lots sont en cours.</numerusform>
            </translation>
        </message>
        <message>
            <source>They stop with the window. No answered row is lost: you can resume them at the next start.</source>
            <translation>Elles s’arrêtent avec la fenêtre. Aucune ligne traitée n’est perdue : vous pourrez les reprendre au prochain démarrage.</translation>
        </message>
        <message>
            <source>Stop them and close</source>
            <translation>Les arrêter et fermer</translation>
        </message>
        <message>
            <source>Keep the window open</source>
            <translation>Garder la fenêtre ouverte</translation>
        </message>
    </context>
    <context>
        <name>SampleCard</name>
        <message>
            <source>Try the first rows</source>
            <translation>Essayer les premières lignes</translation>
        </message>
        <message>
            <source>See the answers, and how fast they come, before you start the job.</source>
            <translation>Voyez les réponses, et à quelle vitesse elles arrivent, avant de démarrer la tâche.</translation>
        </message>
        <message>
            <source>Answering…</source>
            <translation>Réponse en cours…</translation>
        </message>
        <message>
            <source>Stopped.</source>
            <translation>Arrêté.</translation>
        </message>
        <message>
            <source>Answer one row</source>
            <translation>Traiter une ligne</translation>
        </message>
        <message>
            <source>Answer two rows</source>
            <translation>Traiter deux lignes</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>Arrêter</translation>
        </message>
        <message>
            <source>Answer three rows</source>
            <translation>Traiter trois lignes</translation>
        </message>
    </context>
    <context>
        <name>SamplingPopover</name>
        <message>
            <source>Sampling</source>
            <translation>Échantillonnage</translation>
        </message>
        <message>
            <source>Recommended</source>
            <translation>Recommandé</translation>
        </message>
        <message>
            <source>Save as…</source>
            <translation>Enregistrer sous…</translation>
        </message>
        <message>
            <source>Rename…</source>
            <translation>Renommer…</translation>
        </message>
        <message>
            <source>Delete</source>
            <translation>Supprimer</translation>
        </message>
        <message>
            <source>Name of the preset</source>
            <translation>Nom du préréglage</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>Enregistrer</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>New chats begin with this</source>
            <translation>Les nouvelles discussions commencent ainsi</translation>
        </message>
        <message>
            <source>Use for new chats</source>
            <translation>Pour les nouvelles discussions</translation>
        </message>
        <message>
            <source>The model suggests nothing: {0}</source>
            <translation>Le modèle ne suggère rien : {0}</translation>
        </message>
        <message>
            <source>As the model's makers suggest: {0}</source>
            <translation>Comme le suggèrent les auteurs du modèle : {0}</translation>
        </message>
        <message>
            <source>{0}: {1}.</source>
            <translation>{0} : {1}.</translation>
        </message>
        <message>
            <source>Recommended: {0}.</source>
            <translation>Recommandé : {0}.</translation>
        </message>
    </context>
    <context>
        <name>SearchCard</name>
        <message>
            <source>Get a model</source>
            <translation>Obtenir un modèle</translation>
        </message>
        <message>
            <source>Runs well here</source>
            <translation>Tourne bien ici</translation>
        </message>
        <message>
            <source>Apache or MIT licence</source>
            <translation>Licence Apache ou MIT</translation>
        </message>
        <message>
            <source>Size</source>
            <translation>Taille</translation>
        </message>
        <message>
            <source>Any size</source>
            <translation>Toute taille</translation>
        </message>
        <message>
            <source>Up to {0} GB</source>
            <translation>Jusqu’à {0} Go</translation>
        </message>
        <message>
            <source>Good at</source>
            <translation>Points forts</translation>
        </message>
        <message>
            <source>Good at anything</source>
            <translation>Tous les usages</translation>
        </message>
        <message>
            <source>Open its page</source>
            <translation>Ouvrir sa page</translation>
        </message>
        <message>
            <source>Access token…</source>
            <translation>Jeton d’accès…</translation>
        </message>
        <message>
            <source>Looking at this machine…</source>
            <translation>Examen de cette machine…</translation>
        </message>
        <message>
            <source>Nothing in the catalogue matches: press Enter to search the hub, or remove a filter.</source>
            <translation>Rien de tel dans le catalogue : appuyez sur Entrée pour chercher dans le hub, ou filtrez moins.</translation>
        </message>
        <message>
            <source>The hub has nothing for “{0}”: try fewer words.</source>
            <translation>Le hub n’a rien pour « {0} » : essayez moins de mots.</translation>
        </message>
        <message>
            <source>its makers ask you to accept their terms first</source>
            <translation>ses auteurs demandent d’abord d’accepter leurs conditions</translation>
        </message>
        <message>
            <source>Licence: {0}</source>
            <translation>Licence : {0}</translation>
        </message>
        <message>
            <source>Searching…</source>
            <translation>Recherche…</translation>
        </message>
    </context>
    <context>
        <name>SearchLine</name>
        <message>
            <source>Name or words</source>
            <translation>Nom ou mots</translation>
        </message>
        <message>
            <source>Filters the catalogue; Enter searches the hub, also for ORG/NAME or a link</source>
            <translation>Filtre le catalogue ; Entrée cherche dans le hub, aussi pour ORG/NAME ou un lien</translation>
        </message>
        <message>
            <source>Search for a model</source>
            <translation>Rechercher un modèle</translation>
        </message>
        <message>
            <source>Search</source>
            <translation>Rechercher</translation>
        </message>
    </context>
    <context>
        <name>SecondTimeline</name>
        <message>
            <source>Second timeline</source>
            <translation>Deuxième chronologie</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>Predicted</source>
            <translation>Prévu</translation>
        </message>
    </context>
    <context>
        <name>ServedRequests</name>
        <message>
            <source>Time</source>
            <translation>Heure</translation>
        </message>
        <message>
            <source>Program</source>
            <translation>Programme</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modèle</translation>
        </message>
        <message>
            <source>Read</source>
            <translation>Lus</translation>
        </message>
        <message>
            <source>Written</source>
            <translation>Écrits</translation>
        </message>
        <message>
            <source>Seconds</source>
            <translation>Secondes</translation>
        </message>
        <message>
            <source>Outcome</source>
            <translation>Issue</translation>
        </message>
        <message>
            <source>answered</source>
            <translation>répondue</translation>
        </message>
        <message>
            <source>client left</source>
            <translation>client parti</translation>
        </message>
        <message>
            <source>wrong key</source>
            <translation>mauvaise clé</translation>
        </message>
        <message>
            <source>refused ({0})</source>
            <translation>refusée ({0})</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>échec</translation>
        </message>
        <message>
            <source>{0}, {1}: {2}; {3} tokens read, {4} written, {5} s</source>
            <translation>{0}, {1} : {2} ; {3} tokens lus, {4} écrits, {5} s</translation>
        </message>
    </context>
    <context>
        <name>ServerDialog</name>
        <message>
            <source>Save</source>
            <translation>Enregistrer</translation>
        </message>
        <message>
            <source>Test</source>
            <translation>Tester</translation>
        </message>
        <message>
            <source>Add a server</source>
            <translation>Ajouter un serveur</translation>
        </message>
        <message>
            <source>Address</source>
            <translation>Adresse</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>Nom</translation>
        </message>
        <message>
            <source>same as its host</source>
            <translation>comme son hôte</translation>
        </message>
        <message>
            <source>none</source>
            <translation>aucun</translation>
        </message>
        <message>
            <source>as it is kept</source>
            <translation>telle qu’elle est enregistrée</translation>
        </message>
        <message>
            <source>Key</source>
            <translation>Clé</translation>
        </message>
        <message>
            <source>Certificate</source>
            <translation>Certificat</translation>
        </message>
        <message>
            <source>those that the system trusts</source>
            <translation>ceux du système</translation>
        </message>
        <message>
            <source>Choose…</source>
            <translation>Choisir…</translation>
        </message>
        <message>
            <source>Choose a certificate's file</source>
            <translation>Choisir un fichier de certificat</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modèle</translation>
        </message>
        <message>
            <source>Requests at once</source>
            <translation>Requêtes simultanées</translation>
        </message>
        <message>
            <source>as measured</source>
            <translation>selon la mesure</translation>
        </message>
        <message>
            <source>Requests a minute</source>
            <translation>Requêtes par minute</translation>
        </message>
        <message>
            <source>no limit</source>
            <translation>sans limite</translation>
        </message>
        <message>
            <source>Tokens a minute</source>
            <translation>Tokens par minute</translation>
        </message>
        <message>
            <source>Price of a million tokens read</source>
            <translation>Prix d’un million de tokens lus</translation>
        </message>
        <message>
            <source>Price of a million tokens written</source>
            <translation>Prix d’un million de tokens écrits</translation>
        </message>
        <message>
            <source>Currency</source>
            <translation>Devise</translation>
        </message>
        <message>
            <source>Trust its certificate…</source>
            <translation>Faire confiance au certificat…</translation>
        </message>
        <message>
            <source>Per million tokens read</source>
            <translation>Par million de tokens lus</translation>
        </message>
        <message>
            <source>Per million tokens written</source>
            <translation>Par million de tokens écrits</translation>
        </message>
        <message>
            <source>price not known</source>
            <translation>prix inconnu</translation>
        </message>
        <message>
            <source>Chosen in each chat</source>
            <translation>Choisi dans chaque discussion</translation>
        </message>
        <message>
            <source>Less</source>
            <translation>Moins</translation>
        </message>
        <message>
            <source>More: certificate, model, limits and prices</source>
            <translation>Plus : certificat, modèle, limites et prix</translation>
        </message>
        <message>
            <source>It is tested before it is kept: that asks a model for a few tokens. The key is kept in the system's keyring, or for this run only where there is none.</source>
            <translation>Il est testé avant d’être enregistré : un modèle est sollicité pour quelques tokens. La clé est gardée dans le trousseau du système, ou jusqu’à la fermeture seulement s’il n’y en a pas.</translation>
        </message>
        <message>
            <source>Asking {0}…</source>
            <translation>Demande à {0}…</translation>
        </message>
        <message>
            <source>It answers in {0} ms.</source>
            <translation>Il répond en {0} ms.</translation>
        </message>
        <message>
            <source>It answers in {0} ms; the first token came after {1} s.</source>
            <translation>Il répond en {0} ms ; le premier token est arrivé après {1} s.</translation>
        </message>
        <message>
            <source>Choose a model and test again to see what it can do.</source>
            <translation>Choisissez un modèle et testez de nouveau pour voir ce qu’il sait faire.</translation>
        </message>
        <message>
            <source>Its fingerprint (SHA-256) is
{0}
Compare it with what that server shows: “switchyard serve --https” prints it. Only this certificate is trusted for this server then.</source>
            <translation>Son empreinte (SHA-256) est
{0}
Comparez-la avec ce qu’affiche ce serveur : « switchyard serve --https » l’indique. Seul ce certificat sera alors accepté pour ce serveur.</translation>
        </message>
        <message>
            <source>Trust the certificate of {0}?</source>
            <translation>Faire confiance au certificat de {0} ?</translation>
        </message>
        <message>
            <source>Trust it</source>
            <translation>Faire confiance</translation>
        </message>
        <message>
            <source>Certificates (*.pem *.crt *.cer)</source>
            <translation>Certificats (*.pem *.crt *.cer)</translation>
        </message>
        <message>
            <source>The server's certificate</source>
            <translation>Le certificat du serveur</translation>
        </message>
    </context>
    <context>
        <name>Servers</name>
        <message>
            <source>Not tested yet.</source>
            <translation>Pas encore testé.</translation>
        </message>
        <message>
            <source>A server with OpenAI's interface</source>
            <translation>Un serveur avec l’interface d’OpenAI</translation>
        </message>
        <message>
            <source>no model</source>
            <translation>aucun modèle</translation>
        </message>
        <message>
            <source>{0} and {1} more</source>
            <translation>{0} et {1} autres</translation>
        </message>
        <message>
            <source>{0} or {1}</source>
            <translation>{0} ou {1}</translation>
        </message>
        <message>
            <source>It cannot {0}.</source>
            <translation>Impossible : {0}.</translation>
        </message>
        <message>
            <source>Models that read text only, no pictures: {0}.</source>
            <translation>Modèles qui ne lisent que du texte, pas d’images : {0}.</translation>
        </message>
        <message>
            <source>It reads text only, no pictures.</source>
            <translation>Ne lit que du texte, pas d’images.</translation>
        </message>
        <message>
            <source>send answers as they are written</source>
            <translation>envoyer les réponses au fil de l’écriture</translation>
        </message>
        <message>
            <source>count tokens</source>
            <translation>compter les tokens</translation>
        </message>
        <message>
            <source>call tools</source>
            <translation>appeler des outils</translation>
        </message>
        <message>
            <source>keep to a schema</source>
            <translation>respecter un schéma</translation>
        </message>
        <message>
            <source>take top-k, min-p or a repetition penalty</source>
            <translation>accepter top-k, min-p ou une pénalité de répétition</translation>
        </message>
        <message>
            <source>{0} at once</source>
            <translation>{0} à la fois</translation>
        </message>
        <message>
            <source>{0} requests a minute</source>
            <translation>{0} requêtes par minute</translation>
        </message>
        <message>
            <source>{0} tokens a minute</source>
            <translation>{0} tokens par minute</translation>
        </message>
        <message>
            <source>a million tokens read: {0}{1}</source>
            <translation>un million de tokens lus : {0}{1}</translation>
        </message>
        <message>
            <source>written: {0}{1}</source>
            <translation>écrits : {0}{1}</translation>
        </message>
    </context>
    <context>
        <name>ServersCard</name>
        <message>
            <source>Remote servers</source>
            <translation>Serveurs distants</translation>
        </message>
        <message>
            <source>Add…</source>
            <translation>Ajouter…</translation>
        </message>
        <message>
            <source>Add a server</source>
            <translation>Ajouter un serveur</translation>
        </message>
        <message>
            <source>vLLM, SGLang, llama.cpp, Ollama, another Switchyard. Text goes to one only in chats and jobs where you choose it.</source>
            <translation>vLLM, SGLang, llama.cpp, Ollama, un autre Switchyard. Du texte n’y est envoyé que dans les discussions et tâches où vous le choisissez.</translation>
        </message>
        <message>
            <source>Look on this network</source>
            <translation>Chercher sur ce réseau</translation>
        </message>
        <message>
            <source>Models that run elsewhere</source>
            <translation>Modèles exécutés ailleurs</translation>
        </message>
        <message>
            <source>Looking…</source>
            <translation>Recherche…</translation>
        </message>
        <message>
            <source>No Switchyard answered. One does if it was started with “switchyard serve --host 0.0.0.0 --https --announce NAME” in this network.</source>
            <translation>Aucun Switchyard n’a répondu. Il le fait s’il a été lancé sur ce réseau avec « switchyard serve --host 0.0.0.0 --https --announce NAME ».</translation>
        </message>
        <message>
            <source>All that answered are in the list.</source>
            <translation>Tous ceux qui ont répondu sont dans la liste.</translation>
        </message>
        <message>
            <source>Add {0}</source>
            <translation>Ajouter {0}</translation>
        </message>
        <message>
            <source>Found on this network · {0}</source>
            <translation>Trouvé sur ce réseau · {0}</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>Modifier…</translation>
        </message>
        <message>
            <source>Edit {0}</source>
            <translation>Modifier {0}</translation>
        </message>
        <message>
            <source>Remove</source>
            <translation>Retirer</translation>
        </message>
        <message>
            <source>Remove {0}</source>
            <translation>Retirer {0}</translation>
        </message>
        <message>
            <source>Its key is removed, too. Chats that were held with it stay; nothing else answers in them by itself.</source>
            <translation>Sa clé est retirée aussi. Les discussions menées avec lui restent ; rien d’autre n’y répond de lui-même.</translation>
        </message>
        <message>
            <source>Remove {0}?</source>
            <translation>Retirer {0} ?</translation>
        </message>
    </context>
    <context>
        <name>SessionsButton</name>
        <message>
            <source>Sessions</source>
            <translation>Sessions</translation>
        </message>
        <message>
            <source>Reading…</source>
            <translation>Lecture…</translation>
        </message>
        <message>
            <source>None yet: ask something in Chat</source>
            <translation>Aucune pour l’instant : posez une question dans Discussion</translation>
        </message>
        <message>
            <source>Open</source>
            <translation>Ouvrir</translation>
        </message>
        <message>
            <source>Compare with</source>
            <translation>Comparer avec</translation>
        </message>
        <message>
            <source>The session could not be read.</source>
            <translation>La session n’a pas pu être lue.</translation>
        </message>
    </context>
    <context>
        <name>Setting</name>
        <message>
            <source>Automatic</source>
            <translation>Automatique</translation>
        </message>
        <message>
            <source>Speed and memory</source>
            <translation>Vitesse et mémoire</translation>
        </message>
        <message>
            <source>Runs on</source>
            <translation>S’exécute sur</translation>
        </message>
        <message>
            <source>Automatic takes the graphics card, if there is one, and the processor for what does not fit.</source>
            <translation>« Automatique » utilise la carte graphique, s’il y en a une, et le processeur pour ce qui n’y tient pas.</translation>
        </message>
        <message>
            <source>Processor only</source>
            <translation>Processeur seulement</translation>
        </message>
        <message>
            <source>Precision</source>
            <translation>Précision</translation>
        </message>
        <message>
            <source>Automatic keeps the best that fits. Lower precision takes less memory and is faster.</source>
            <translation>« Automatique » garde la meilleure qui tienne. Des poids plus grossiers prennent moins de mémoire et sont plus rapides.</translation>
        </message>
        <message>
            <source>Graphics memory to use</source>
            <translation>Mémoire graphique à utiliser</translation>
        </message>
        <message>
            <source>For experts that are used often; the rest is left to other programs.</source>
            <translation>Pour les experts souvent utilisés ; le reste est laissé aux autres programmes.</translation>
        </message>
        <message>
            <source>RAM to use</source>
            <translation>RAM à utiliser</translation>
        </message>
        <message>
            <source>For the model; what does not fit is read from the disk again and again.</source>
            <translation>Pour le modèle ; ce qui n’y tient pas est sans cesse relu sur le disque.</translation>
        </message>
        <message>
            <source>CPU threads</source>
            <translation>Threads du processeur</translation>
        </message>
        <message>
            <source>Automatic uses one per core. Fewer leave room for other programs.</source>
            <translation>« Automatique » en utilise un par cœur. Moins laisse de la place aux autres programmes.</translation>
        </message>
        <message>
            <source>For experts</source>
            <translation>Pour les experts</translation>
        </message>
        <message>
            <source>Experts on each card</source>
            <translation>Experts sur chaque carte</translation>
        </message>
        <message>
            <source>Automatic keeps as many as fit; 0 keeps none.</source>
            <translation>Automatique garde tous ceux qui tiennent ; 0 n’en garde aucun.</translation>
        </message>
        <message>
            <source>Slots for each layer</source>
            <translation>Emplacements par couche</translation>
        </message>
        <message>
            <source>Automatic lets all layers share the slots; a number gives each layer that many of its own.</source>
            <translation>En automatique, toutes les couches partagent les emplacements ; un nombre en donne autant à chacune.</translation>
        </message>
        <message>
            <source>Which experts stay on the card</source>
            <translation>Experts qui restent sur la carte</translation>
        </message>
        <message>
            <source>Automatic watches which rule would have kept the right ones, and takes that one.</source>
            <translation>« Automatique » observe quelle règle aurait gardé les bons experts, et l’adopte.</translation>
        </message>
        <message>
            <source>Recently used ones</source>
            <translation>Les plus récemment utilisés</translation>
        </message>
        <message>
            <source>Newest ones</source>
            <translation>Les plus récents</translation>
        </message>
        <message>
            <source>Often used ones</source>
            <translation>Les plus utilisés</translation>
        </message>
        <message>
            <source>Recently and often used ones</source>
            <translation>Récemment et souvent utilisés</translation>
        </message>
        <message>
            <source>Random ones</source>
            <translation>Au hasard</translation>
        </message>
        <message>
            <source>Popular ones, fixed</source>
            <translation>Les plus demandés, fixes</translation>
        </message>
        <message>
            <source>Experts that are not on the card</source>
            <translation>Experts absents de la carte</translation>
        </message>
        <message>
            <source>All but the first are for comparisons.</source>
            <translation>Tous les choix sauf le premier servent à comparer.</translation>
        </message>
        <message>
            <source>Whichever is faster</source>
            <translation>Le plus rapide</translation>
        </message>
        <message>
            <source>Processor computes</source>
            <translation>Le processeur calcule</translation>
        </message>
        <message>
            <source>Card fetches</source>
            <translation>La carte les charge</translation>
        </message>
        <message>
            <source>Nothing is kept</source>
            <translation>Rien n’est gardé</translation>
        </message>
        <message>
            <source>Whole layers</source>
            <translation>Couches entières</translation>
        </message>
        <message>
            <source>Guessing which experts come next</source>
            <translation>Deviner les experts suivants</translation>
        </message>
        <message>
            <source>Guessed experts are copied to the card in advance. Automatic uses what pays off, if anything does.</source>
            <translation>Les experts devinés sont copiés d’avance sur la carte. Automatique prend ce qui est rentable, s’il y a lieu.</translation>
        </message>
        <message>
            <source>Off</source>
            <translation>Désactivée</translation>
        </message>
        <message>
            <source>Those of the last token</source>
            <translation>Ceux du dernier token</translation>
        </message>
        <message>
            <source>The next layer’s router</source>
            <translation>Le routeur de la couche suivante</translation>
        </message>
        <message>
            <source>What usually follows</source>
            <translation>Ce qui suit d’habitude</translation>
        </message>
        <message>
            <source>A trained predictor</source>
            <translation>Un prédicteur entraîné</translation>
        </message>
        <message>
            <source>Replay steps on the card</source>
            <translation>Rejouer les étapes sur la carte</translation>
        </message>
        <message>
            <source>The card replays a recorded step (a CUDA graph) instead of being told each operation.</source>
            <translation>La carte rejoue une étape enregistrée (un graphe CUDA) au lieu de recevoir chaque opération.</translation>
        </message>
        <message>
            <source>On</source>
            <translation>Activée</translation>
        </message>
        <message>
            <source>Several graphics cards</source>
            <translation>Plusieurs cartes graphiques</translation>
        </message>
        <message>
            <source>By layers, each card has a run of layers; by experts, each has a part of every layer’s experts.</source>
            <translation>Par couches, chaque carte a une suite de couches ; par experts, chacune a une partie des experts de chaque couche.</translation>
        </message>
        <message>
            <source>By layers</source>
            <translation>Par couches</translation>
        </message>
        <message>
            <source>By experts</source>
            <translation>Par experts</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modèle</translation>
        </message>
        <message>
            <source>Speculative decoding</source>
            <translation>Décodage spéculatif</translation>
        </message>
        <message>
            <source>Answers that quote, such as edits of a text, come faster: likely next words are tried together, only as long as that pays. Answers stay the same.</source>
            <translation>Les réponses qui citent, comme la modification d’un texte, arrivent plus vite : les mots suivants probables sont essayés ensemble, tant que cela en vaut la peine. Les réponses restent les mêmes.</translation>
        </message>
        <message>
            <source>Where it pays</source>
            <translation>Quand c’est rentable</translation>
        </message>
        <message>
            <source>With the model’s own layer</source>
            <translation>Avec la couche du modèle</translation>
        </message>
        <message>
            <source>Keys and values</source>
            <translation>Clés et valeurs</translation>
        </message>
        <message>
            <source>What the model keeps of a conversation. int8 takes about half the memory; answers may differ slightly (with the starter, perplexity rose by 0.08%).</source>
            <translation>Ce que le modèle retient d’une conversation. int8 prend environ moitié moins de mémoire ; les réponses peuvent différer légèrement (avec le modèle de départ, la perplexité a augmenté de 0,08 %).</translation>
        </message>
        <message>
            <source>As in the model</source>
            <translation>Comme dans le modèle</translation>
        </message>
        <message>
            <source>Appearance</source>
            <translation>Apparence</translation>
        </message>
        <message>
            <source>Theme</source>
            <translation>Thème</translation>
        </message>
        <message>
            <source>System follows the desktop's setting.</source>
            <translation>« Système » suit le réglage du bureau.</translation>
        </message>
        <message>
            <source>System</source>
            <translation>Système</translation>
        </message>
        <message>
            <source>Light</source>
            <translation>Clair</translation>
        </message>
        <message>
            <source>Dark</source>
            <translation>Sombre</translation>
        </message>
        <message>
            <source>Language</source>
            <translation>Langue</translation>
        </message>
        <message>
            <source>System is the language of this PC, or English.</source>
            <translation>« Système » est la langue de ce PC, sinon l’anglais.</translation>
        </message>
        <message>
            <source>Text size</source>
            <translation>Taille du texte</translation>
        </message>
        <message>
            <source>Of everything in this window.</source>
            <translation>De tout dans cette fenêtre.</translation>
        </message>
        <message>
            <source>Default model</source>
            <translation>Modèle par défaut</translation>
        </message>
        <message>
            <source>Loaded when Switchyard starts.</source>
            <translation>Chargé au démarrage de Switchyard.</translation>
        </message>
        <message>
            <source>Free the memory after</source>
            <translation>Libérer la mémoire après</translation>
        </message>
        <message>
            <source>If the model is not used for this long; the next question loads it again.</source>
            <translation>Si personne n’utilise le modèle pendant ce temps ; la question suivante le recharge.</translation>
        </message>
        <message>
            <source>Never</source>
            <translation>Jamais</translation>
        </message>
        <message>
            <source>Batch jobs at once</source>
            <translation>Tâches par lots simultanées</translation>
        </message>
        <message>
            <source>They share each pass through the model; others wait for their turn.</source>
            <translation>Elles partagent chaque passage dans le modèle ; les autres attendent leur tour.</translation>
        </message>
        <message>
            <source>Quick question</source>
            <translation>Question rapide</translation>
        </message>
        <message>
            <source>Icon in the tray</source>
            <translation>Icône de notification</translation>
        </message>
        <message>
            <source>Click it to ask a question from anywhere, in a small window above the others.</source>
            <translation>Un clic dessus pose une question de n’importe où, dans une petite fenêtre au-dessus des autres.</translation>
        </message>
        <message>
            <source>Keep running when the window is closed</source>
            <translation>Rester actif quand la fenêtre est fermée</translation>
        </message>
        <message>
            <source>The model stays in memory, and answers and batch jobs go on. Quit from the icon’s menu or with Ctrl+Q.</source>
            <translation>Le modèle reste en mémoire ; les réponses et tâches par lots continuent. Quittez par le menu de l’icône ou avec Ctrl+Q.</translation>
        </message>
        <message>
            <source>API server</source>
            <translation>Serveur d’API</translation>
        </message>
        <message>
            <source>Let apps use the models of this PC</source>
            <translation>Laisser des applications utiliser les modèles de ce PC</translation>
        </message>
        <message>
            <source>Who may use it</source>
            <translation>Qui peut l’utiliser</translation>
        </message>
        <message>
            <source>This PC</source>
            <translation>Ce PC</translation>
        </message>
        <message>
            <source>This PC, with key</source>
            <translation>Ce PC, avec clé</translation>
        </message>
        <message>
            <source>Network, with key</source>
            <translation>Réseau, avec clé</translation>
        </message>
        <message>
            <source>Port</source>
            <translation>Port</translation>
        </message>
        <message>
            <source>Choose another if a program on this PC already uses it.</source>
            <translation>Un autre, si un programme d’ici l’utilise déjà.</translation>
        </message>
        <message>
            <source>Free them after</source>
            <translation>Les libérer après</translation>
        </message>
        <message>
            <source>A model that a program asked for is freed once no program has used it for this long.</source>
            <translation>Un modèle demandé par un programme est libéré quand aucun programme ne l’a utilisé pendant ce temps.</translation>
        </message>
        <message>
            <source>Keep loaded</source>
            <translation>Garder chargés</translation>
        </message>
        <message>
            <source>My model makes room for them</source>
            <translation>Mon modèle leur fait de la place</translation>
        </message>
        <message>
            <source>Where both do not fit, yours is put aside, and loaded again for your next question.</source>
            <translation>Si les deux ne tiennent pas, le vôtre est mis de côté, et rechargé à votre prochaine question.</translation>
        </message>
        <message>
            <source>Monitor</source>
            <translation>Moniteur</translation>
        </message>
        <message>
            <source>Record sessions</source>
            <translation>Enregistrer les sessions</translation>
        </message>
        <message>
            <source>Timings and counters that the Monitor can open later: no prompts, no answers. They stay on this machine and take up to 512 MB; the oldest are deleted.</source>
            <translation>Durées et compteurs que le Moniteur peut ouvrir plus tard : ni prompts, ni réponses. Ils restent sur cette machine et occupent jusqu’à 512 Mo ; les plus anciens sont supprimés.</translation>
        </message>
        <message>
            <source>Updates</source>
            <translation>Mises à jour</translation>
        </message>
        <message>
            <source>Check for updates</source>
            <translation>Rechercher des mises à jour</translation>
        </message>
        <message>
            <source>Once a day, at the start. Nothing about you is sent, and nothing is downloaded without asking.</source>
            <translation>Une fois par jour, au démarrage. Rien à votre sujet n’est envoyé, et rien n’est téléchargé sans votre accord.</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>Température</translation>
        </message>
        <message>
            <source>0 always takes the likeliest token; higher is more varied</source>
            <translation>0 prend toujours le token le plus probable ; plus élevé, c’est plus varié</translation>
        </message>
        <message>
            <source>Top-k</source>
            <translation>Top-k</translation>
        </message>
        <message>
            <source>Sample from the k likeliest tokens</source>
            <translation>Tirer parmi les k tokens les plus probables</translation>
        </message>
        <message>
            <source>off</source>
            <translation>désactivé</translation>
        </message>
        <message>
            <source>Top-p</source>
            <translation>Top-p</translation>
        </message>
        <message>
            <source>Sample from the likeliest tokens with a total probability of p; 1 is off</source>
            <translation>Tirer parmi les tokens les plus probables dont la probabilité totale est p ; 1 désactive</translation>
        </message>
        <message>
            <source>Min-p</source>
            <translation>Min-p</translation>
        </message>
        <message>
            <source>Drop tokens below this share of the likeliest one's probability; 0 is off</source>
            <translation>Écarter les tokens sous cette part de la probabilité du plus probable ; 0 désactive</translation>
        </message>
        <message>
            <source>Repetition penalty</source>
            <translation>Pénalité répétition</translation>
        </message>
        <message>
            <source>Above 1, tokens already used become less likely; 1 is off</source>
            <translation>Au-dessus de 1, les tokens déjà utilisés deviennent moins probables ; 1 désactive</translation>
        </message>
        <message>
            <source>Seed</source>
            <translation>Graine</translation>
        </message>
        <message>
            <source>The same seed gives the same answer to the same chat</source>
            <translation>La même graine donne la même réponse dans la même discussion</translation>
        </message>
        <message>
            <source>random</source>
            <translation>aléatoire</translation>
        </message>
        <message>
            <source>Stop strings</source>
            <translation>Textes d’arrêt</translation>
        </message>
        <message>
            <source>An answer ends before the first of these</source>
            <translation>Une réponse s’arrête avant le premier de ceux-ci</translation>
        </message>
        <message>
            <source>Max tokens</source>
            <translation>Tokens max.</translation>
        </message>
        <message>
            <source>Answers stop at this length</source>
            <translation>Les réponses s’arrêtent à cette longueur</translation>
        </message>
        <message>
            <source>Beams</source>
            <translation>Faisceaux</translation>
        </message>
        <message>
            <source>Beam search if above 1; ignores temperature, top-k, top-p and min-p</source>
            <translation>Recherche en faisceau au-dessus de 1 ; ignore température, top-k, top-p et min-p</translation>
        </message>
        <message>
            <source>Loop guard</source>
            <translation>Anti-boucle</translation>
        </message>
        <message>
            <source>Ends loops (DRY): what would repeat earlier text becomes less likely; 0 is off, 0.8 is usual</source>
            <translation>Met fin aux boucles (DRY) : ce qui répéterait un texte antérieur devient moins probable ; 0 désactive, 0,8 est courant</translation>
        </message>
        <message>
            <source>Guard: growth</source>
            <translation>Boucle : hausse</translation>
        </message>
        <message>
            <source>How much stronger the loop guard gets with each repeated token</source>
            <translation>De combien l’anti-boucle se renforce à chaque token répété</translation>
        </message>
        <message>
            <source>Guard: length</source>
            <translation>Boucle : longueur</translation>
        </message>
        <message>
            <source>Repetitions shorter than this many tokens are free</source>
            <translation>Les répétitions plus courtes que ce nombre de tokens sont libres</translation>
        </message>
        <message>
            <source>Guard: range</source>
            <translation>Boucle : portée</translation>
        </message>
        <message>
            <source>How many of the last tokens, earlier messages included, are searched; by default only the answer</source>
            <translation>Combien des derniers tokens, messages précédents compris, sont examinés ; par défaut, seulement la réponse</translation>
        </message>
        <message>
            <source>answer</source>
            <translation>réponse</translation>
        </message>
        <message>
            <source>Guard: ends at</source>
            <translation>Boucle : fin à</translation>
        </message>
        <message>
            <source>Repetitions are not followed across these texts; \n is a line break</source>
            <translation>Les répétitions ne sont pas suivies au-delà de ces textes ; \n est un saut de ligne</translation>
        </message>
        <message>
            <source>Presence penalty</source>
            <translation>Pénalité présence</translation>
        </message>
        <message>
            <source>Makes every token that the answer has already less likely, once; 0 is off</source>
            <translation>Rend une fois moins probable chaque token déjà présent dans la réponse ; 0 désactive</translation>
        </message>
        <message>
            <source>Frequency penalty</source>
            <translation>Pénalité fréquence</translation>
        </message>
        <message>
            <source>Makes tokens less likely with each time that the answer has them already; 0 is off</source>
            <translation>Rend un token moins probable à chaque fois qu’il est déjà dans la réponse ; 0 désactive</translation>
        </message>
        <message>
            <source>Thinking</source>
            <translation>Réflexion</translation>
        </message>
        <message>
            <source>Whether the model reasons before it answers; its thoughts count as tokens of the answer</source>
            <translation>Si le modèle raisonne avant de répondre ; ses réflexions comptent comme tokens de la réponse</translation>
        </message>
        <message>
            <source>As the model does</source>
            <translation>Comme prévu par le modèle</translation>
        </message>
        <message>
            <source>Low</source>
            <translation>Faible</translation>
        </message>
        <message>
            <source>Medium</source>
            <translation>Moyenne</translation>
        </message>
        <message>
            <source>High</source>
            <translation>Élevée</translation>
        </message>
        <message>
            <source>Keep chats' computed context on disk</source>
            <translation>Garder sur le disque le contexte calculé des discussions</translation>
        </message>
        <message>
            <source>A chat then goes on at once after another one or a restart: what the model has read need not be read again. It is made of your prompts and answers, encrypted, and removed with its chat. The key is in the system's keyring; where there is none it is a file beside the settings, and whoever can read your files can decrypt it. Turning this off removes what is kept.</source>
            <translation>Une discussion reprend alors immédiatement, après une autre ou après un redémarrage : ce que le modèle a lu n’a pas à être relu. Ces données proviennent de vos prompts et réponses ; elles sont chiffrées et supprimées avec leur discussion. La clé est dans le trousseau du système ; s’il n’y en a pas, c’est un fichier à côté des réglages, et quiconque peut lire vos fichiers peut les déchiffrer. Désactiver cette option supprime ce qui est gardé.</translation>
        </message>
        <message>
            <source>At most</source>
            <translation>Au plus</translation>
        </message>
        <message>
            <source>What was of no use for longest is removed first. 2 GB of the disk always stay free.</source>
            <translation>Ce qui n’a pas servi depuis le plus longtemps est supprimé d’abord. 2 Go du disque restent toujours libres.</translation>
        </message>
    </context>
    <context>
        <name>Settings</name>
        <message>
            <source>The settings could not be saved to {0} ({1}); free some space or check its permissions.</source>
            <translation>Les paramètres n’ont pas pu être enregistrés dans {0} ({1}) ; libérez de l’espace ou vérifiez les autorisations.</translation>
        </message>
        <message>
            <source>The settings in {0} could not be read ({1}), so the defaults are used.</source>
            <translation>Les paramètres de {0} n’ont pas pu être lus ({1}) ; les valeurs par défaut sont utilisées.</translation>
        </message>
        <message>
            <source>Some settings in {0} make no sense ({1}): the usual ones are used instead of these.</source>
            <translation>Certains réglages de {0} n’ont pas de sens ({1}) : les valeurs habituelles les remplacent.</translation>
        </message>
        <message>
            <source>The settings file was damaged; it is kept as {0}, and the defaults are used.</source>
            <translation>Le fichier des paramètres était endommagé ; il est conservé sous {0}, et les valeurs par défaut sont utilisées.</translation>
        </message>
    </context>
    <context>
        <name>SettingsCard</name>
        <message>
            <source>Hide</source>
            <translation>Masquer</translation>
        </message>
        <message>
            <source>Show</source>
            <translation>Afficher</translation>
        </message>
        <message>
            <source>Needs a reload.</source>
            <translation>Nécessite un rechargement.</translation>
        </message>
        <message>
            <source>Needs a restart.</source>
            <translation>Nécessite un redémarrage.</translation>
        </message>
        <message>
            <source>{0} px</source>
            <translation>{0} px</translation>
        </message>
        <message>
            <source>all that is free</source>
            <translation>tout ce qui est libre</translation>
        </message>
        <message>
            <source>at most {0}</source>
            <translation>au plus {0}</translation>
        </message>
        <message>
            <source>none; separate with commas</source>
            <translation>aucun ; séparez par des virgules</translation>
        </message>
    </context>
    <context>
        <name>SettingsPage</name>
        <message>
            <source>This desktop has no tray for icons.</source>
            <translation>Ce bureau n’a pas de zone de notification.</translation>
        </message>
        <message>
            <source>No setting has these words.</source>
            <translation>Aucun réglage ne contient ces mots.</translation>
        </message>
        <message>
            <source>Find a setting</source>
            <translation>Chercher un réglage</translation>
        </message>
        <message>
            <source>Settings</source>
            <translation>Paramètres</translation>
        </message>
    </context>
    <context>
        <name>SharedSettingsCard</name>
        <message>
            <source>Template</source>
            <translation>Modèle de prompt</translation>
        </message>
        <message>
            <source>Input</source>
            <translation>Entrée</translation>
        </message>
        <message>
            <source>Result</source>
            <translation>Résultat</translation>
        </message>
        <message>
            <source>Model</source>
            <translation>Modèle</translation>
        </message>
        <message>
            <source>Answered by</source>
            <translation>Réponses de</translation>
        </message>
        <message>
            <source>Max tokens</source>
            <translation>Tokens max.</translation>
        </message>
        <message>
            <source>Temperature</source>
            <translation>Température</translation>
        </message>
        <message>
            <source>Answer must be</source>
            <translation>Forme de la réponse</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>Prompt système</translation>
        </message>
        <message>
            <source>Each row's own messages</source>
            <translation>Les propres messages de chaque ligne</translation>
        </message>
        <message>
            <source>JSON with a schema</source>
            <translation>JSON selon un schéma</translation>
        </message>
        <message>
            <source>one of {0}</source>
            <translation>un de {0}</translation>
        </message>
        <message>
            <source>text</source>
            <translation>texte</translation>
        </message>
        <message>
            <source>0 (the likeliest token)</source>
            <translation>0 (le token le plus probable)</translation>
        </message>
        <message>
            <source>none</source>
            <translation>aucun</translation>
        </message>
        <message>
            <source>the servers' own</source>
            <translation>ceux du serveur</translation>
        </message>
        <message>
            <source>the loaded one</source>
            <translation>celui qui est chargé</translation>
        </message>
        <message>
            <source>this PC</source>
            <translation>ce PC</translation>
        </message>
        <message>
            <source>the Ray cluster at {0}</source>
            <translation>le cluster Ray à {0}</translation>
        </message>
    </context>
    <context>
        <name>ShortcutsDialog</name>
        <message>
            <source>Keyboard shortcuts</source>
            <translation>Raccourcis clavier</translation>
        </message>
    </context>
    <context>
        <name>SideBySide</name>
        <message>
            <source>Side by side</source>
            <translation>Côte à côte</translation>
        </message>
        <message>
            <source>Question for both</source>
            <translation>Question aux deux</translation>
        </message>
        <message>
            <source>One question for both</source>
            <translation>Une question pour les deux</translation>
        </message>
        <message>
            <source>Ask both</source>
            <translation>Demander aux deux</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>The model here</source>
            <translation>Le modèle d’ici</translation>
        </message>
        <message>
            <source>its only model</source>
            <translation>son seul modèle</translation>
        </message>
        <message>
            <source>This chat is being answered: wait for the end, or stop it.</source>
            <translation>Une réponse est en cours dans cette discussion : attendez la fin, ou arrêtez-la.</translation>
        </message>
        <message>
            <source>Stop</source>
            <translation>Arrêter</translation>
        </message>
        <message>
            <source>Choose another model or other settings for one of them.</source>
            <translation>Choisissez un autre modèle ou d’autres réglages pour l’un des deux.</translation>
        </message>
        <message>
            <source>One model is open at a time on this PC: the second is loaded when the first has answered.</source>
            <translation>Un seul modèle à la fois est ouvert sur ce PC : le second est chargé quand le premier a répondu.</translation>
        </message>
        <message>
            <source>Both answers are kept in the chat, as versions of one turn.</source>
            <translation>Les deux réponses sont gardées dans la discussion, comme versions d’un même échange.</translation>
        </message>
    </context>
    <context>
        <name>Sidebar</name>
        <message>
            <source>Navigation</source>
            <translation>Navigation</translation>
        </message>
        <message>
            <source>Go to {0}</source>
            <translation>Aller à {0}</translation>
        </message>
    </context>
    <context>
        <name>SizeChooser</name>
        <message>
            <source>Experts kept in this tier</source>
            <translation>Experts gardés à ce niveau</translation>
        </message>
        <message>
            <source>Experts kept</source>
            <translation>Experts gardés</translation>
        </message>
        <message>
            <source>Resize</source>
            <translation>Redimensionner</translation>
        </message>
        <message>
            <source>Lasts until the model is reloaded; Tune sets a permanent size.</source>
            <translation>Valable jusqu’au rechargement du modèle ; Optimiser fixe une taille permanente.</translation>
        </message>
        <message>
            <source>Undo</source>
            <translation>Annuler</translation>
        </message>
    </context>
    <context>
        <name>SourceRow</name>
        <message>
            <source>Sources</source>
            <translation>Sources</translation>
        </message>
        <message>
            <source> p. {0}</source>
            <translation> p. {0}</translation>
        </message>
        <message>
            <source>Source {0}: {1}</source>
            <translation>Source {0} : {1}</translation>
        </message>
    </context>
    <context>
        <name>StarterDownload</name>
        <message>
            <source>The download could not be started: reinstall Switchyard.</source>
            <translation>Le téléchargement n’a pas pu démarrer : réinstallez Switchyard.</translation>
        </message>
        <message>
            <source>The starter model could not be built; try again.</source>
            <translation>Le modèle de départ n’a pas pu être construit ; réessayez.</translation>
        </message>
    </context>
    <context>
        <name>StarterOffer</name>
        <message>
            <source>Download of the starter model</source>
            <translation>Téléchargement du modèle de départ</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>Try again</source>
            <translation>Réessayer</translation>
        </message>
        <message>
            <source>Get the starter (93 MB)</source>
            <translation>Obtenir le modèle de départ (93 Mo)</translation>
        </message>
        <message>
            <source>Getting the starter model…</source>
            <translation>Obtention du modèle de départ…</translation>
        </message>
        <message>
            <source>Stopping…</source>
            <translation>Arrêt…</translation>
        </message>
        <message>
            <source>Getting the starter model, {0}% done…</source>
            <translation>Obtention du modèle de départ, {0} % fait…</translation>
        </message>
    </context>
    <context>
        <name>StepBar</name>
        <message>
            <source>Steps</source>
            <translation>Étapes</translation>
        </message>
        <message>
            <source>Your machine</source>
            <translation>Votre machine</translation>
        </message>
        <message>
            <source>Measure</source>
            <translation>Mesurer</translation>
        </message>
        <message>
            <source>Plan</source>
            <translation>Plan</translation>
        </message>
        <message>
            <source>Timed tokens</source>
            <translation>Chronométrage</translation>
        </message>
        <message>
            <source>Step {0}: {1}</source>
            <translation>Étape {0} : {1}</translation>
        </message>
        <message>
            <source>Alt+{0}</source>
            <translation>Alt+{0}</translation>
        </message>
    </context>
    <context>
        <name>SummaryCard</name>
        <message>
            <source>Open Tune</source>
            <translation>Ouvrir Optimiser</translation>
        </message>
        <message>
            <source>The engine is starting.</source>
            <translation>Le moteur démarre.</translation>
        </message>
        <message>
            <source>The model is loading.</source>
            <translation>Le modèle se charge.</translation>
        </message>
        <message>
            <source>The engine has stopped.</source>
            <translation>Le moteur s’est arrêté.</translation>
        </message>
        <message>
            <source>Its recording is still here; the machine's lanes continue.</source>
            <translation>Son enregistrement est toujours là ; les pistes de la machine continuent.</translation>
        </message>
        <message>
            <source>Nothing computed yet.</source>
            <translation>Rien n’a encore été calculé.</translation>
        </message>
        <message>
            <source>Ask something in Chat and watch it here.</source>
            <translation>Posez une question dans Discussion et observez ici.</translation>
        </message>
        <message>
            <source>No model is loaded.</source>
            <translation>Aucun modèle n’est chargé.</translation>
        </message>
        <message>
            <source>The machine is still shown. Load a model in Settings, then ask something in Chat.</source>
            <translation>La machine reste affichée. Chargez un modèle dans Paramètres, puis posez une question dans Discussion.</translation>
        </message>
        <message>
            <source>Nothing was decoded in this session.</source>
            <translation>Rien n’a été décodé pendant cette session.</translation>
        </message>
        <message>
            <source>Nothing has been decoded yet.</source>
            <translation>Rien n’a encore été décodé.</translation>
        </message>
        <message>
            <source>Their time went to: {0}.</source>
            <translation>Leur temps est allé à : {0}.</translation>
        </message>
        <message>
            <source>Its time went to: {0}.</source>
            <translation>Son temps est allé à : {0}.</translation>
        </message>
        <message>
            <source>Other programs used {0}% of the CPU, which slows everything down.</source>
            <translation>D’autres programmes ont utilisé {0} % du processeur, ce qui ralentit tout.</translation>
        </message>
        <message>
            <source>A picture was read first, in {0} s.</source>
            <translation>Une image a d'abord été lue, en {0} s.</translation>
        </message>
        <message>
            <source>{0} pictures were read first, in {1} s.</source>
            <translation>{0} images ont d'abord été lues, en {1} s.</translation>
        </message>
        <message>
            <source>Batch: last {0} tokens, {1} per step, {2}/s.</source>
            <translation>Lots : {0} derniers tokens, {1} par étape, {2}/s.</translation>
        </message>
        <message>
            <source>The last token took {0} ms.</source>
            <translation>Le dernier token a pris {0} ms.</translation>
        </message>
        <message numerus="yes">
            <source>Last {0} tokens, {1}/s.</source>
            <translation>
                <numerusform>Dernier {0} token, {1}/s.</numerusform>
                <numerusform>{0} derniers tokens, {1}/s.</numerusform>
            </translation>
        </message>
        <message>
            <source>Close or pause them first; further advice needs an idle machine.</source>
            <translation>Fermez-les ou suspendez-les d’abord ; pour d’autres conseils, la machine doit être au repos.</translation>
        </message>
        <message>
            <source>{0} CPU threads would be about {1} times as fast (predicted).</source>
            <translation>{0} threads du processeur seraient environ {1} fois plus rapides (prévu).</translation>
        </message>
        <message>
            <source>With {0} experts kept in VRAM it would be about {1} times as fast (predicted).</source>
            <translation>Avec {0} experts gardés en VRAM, ce serait environ {1} fois plus rapide (prévu).</translation>
        </message>
        <message>
            <source>With {0} experts kept in RAM it would be about {1} times as fast (predicted).</source>
            <translation>Avec {0} experts gardés en RAM, ce serait environ {1} fois plus rapide (prévu).</translation>
        </message>
        <message>
            <source>{0} weights would be about {1} times as fast (predicted).</source>
            <translation>Des poids en {0} seraient environ {1} fois plus rapides (prévu).</translation>
        </message>
        <message>
            <source>No single change is predicted to gain over 5%.</source>
            <translation>Aucun changement à lui seul ne promet plus de 5 %.</translation>
        </message>
    </context>
    <context>
        <name>SystemPromptPopover</name>
        <message>
            <source>System prompt</source>
            <translation>Prompt système</translation>
        </message>
        <message>
            <source>Instructions the model reads first, such as who it is and how to answer.</source>
            <translation>Instructions que le modèle lit en premier, par exemple qui il est et comment répondre.</translation>
        </message>
        <message>
            <source>You are a helpful assistant that answers in one sentence.</source>
            <translation>Tu es un assistant serviable qui répond en une phrase.</translation>
        </message>
    </context>
    <context>
        <name>TelemetryHub</name>
        <message>
            <source>{0} loaded</source>
            <translation>{0} chargé</translation>
        </message>
        <message>
            <source>The engine ended unexpectedly</source>
            <translation>Le moteur s’est arrêté de façon inattendue</translation>
        </message>
        <message>
            <source>The engine ended</source>
            <translation>Le moteur s’est arrêté</translation>
        </message>
        <message>
            <source>The engine's clock jumped</source>
            <translation>L’horloge du moteur a sauté</translation>
        </message>
        <message>
            <source>The session is no longer recorded: its file could not be written ({0}).</source>
            <translation>La session n’est plus enregistrée : son fichier n’a pas pu être écrit ({0}).</translation>
        </message>
    </context>
    <context>
        <name>TemplateCard</name>
        <message>
            <source>Prompt for each row</source>
            <translation>Prompt pour chaque ligne</translation>
        </message>
        <message>
            <source>Template</source>
            <translation>Modèle de prompt</translation>
        </message>
        <message>
            <source>Click a column to insert it at the cursor; it stands for each row's own text.</source>
            <translation>Cliquez sur une colonne pour l’insérer au curseur ; elle représente le texte de chaque ligne.</translation>
        </message>
        <message>
            <source>Column of pictures</source>
            <translation>Colonne d'images</translation>
        </message>
        <message>
            <source>Its cells are paths of pictures, which begin in the file's folder, for a model that sees</source>
            <translation>Ses cellules sont des chemins d'images, à partir du dossier du fichier, pour un modèle qui voit les images</translation>
        </message>
        <message>
            <source>System prompt</source>
            <translation>Prompt système</translation>
        </message>
        <message>
            <source>System prompt: instructions for every row (optional)</source>
            <translation>Prompt système : instructions pour chaque ligne (facultatif)</translation>
        </message>
        <message>
            <source>Pictures: none</source>
            <translation>Images : aucune</translation>
        </message>
        <message>
            <source>Pictures: {0}</source>
            <translation>Images : {0}</translation>
        </message>
        <message>
            <source>Insert column {0}</source>
            <translation>Insérer la colonne {0}</translation>
        </message>
        <message>
            <source>Summarise in one line: {0}</source>
            <translation>Résume en une ligne : {0}</translation>
        </message>
        <message>
            <source>Describe the picture.</source>
            <translation>Décris l'image.</translation>
        </message>
        <message>
            <source>{0} reads text only, so rows with pictures get no answer: choose a model that sees.</source>
            <translation>{0} ne lit que du texte, les lignes avec images restent donc sans réponse : choisissez un modèle qui voit les images.</translation>
        </message>
        <message>
            <source>Write a prompt that includes a column.</source>
            <translation>Écrivez un prompt qui contient une colonne.</translation>
        </message>
    </context>
    <context>
        <name>Thought</name>
        <message>
            <source>Copy what it thought</source>
            <translation>Copier ses réflexions</translation>
        </message>
        <message>
            <source>Thinking</source>
            <translation>Réflexion</translation>
        </message>
        <message>
            <source>Fold what the model thought</source>
            <translation>Replier les réflexions du modèle</translation>
        </message>
        <message>
            <source>Show what the model thought</source>
            <translation>Afficher les réflexions du modèle</translation>
        </message>
        <message>
            <source>unfolded</source>
            <translation>déplié</translation>
        </message>
        <message>
            <source>folded</source>
            <translation>replié</translation>
        </message>
        <message>
            <source>What the model thought</source>
            <translation>Réflexions du modèle</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>Copié</translation>
        </message>
    </context>
    <context>
        <name>TierRow</name>
        <message>
            <source>Hit rate of the last three minutes of decoding, 0 to 100%</source>
            <translation>Taux de succès des trois dernières minutes de décodage, 0 à 100 %</translation>
        </message>
        <message>
            <source>{0} hits</source>
            <translation>{0} de succès</translation>
        </message>
        <message>
            <source>{0}%</source>
            <translation>{0} %</translation>
        </message>
        <message>
            <source>{0}% overall</source>
            <translation>{0} % au total</translation>
        </message>
        <message>
            <source>{0} of {1} experts</source>
            <translation>{0} experts sur {1}</translation>
        </message>
        <message>
            <source>Since the model was loaded: {0} of {1} lookups</source>
            <translation>Depuis le chargement du modèle : {0} accès sur {1}</translation>
        </message>
    </context>
    <context>
        <name>Timeline</name>
        <message>
            <source>Lane</source>
            <translation>Piste</translation>
        </message>
        <message>
            <source>Last</source>
            <translation>Dernier</translation>
        </message>
        <message>
            <source>Average</source>
            <translation>Moyenne</translation>
        </message>
        <message>
            <source>Max</source>
            <translation>Max.</translation>
        </message>
        <message>
            <source>{0}, out</source>
            <translation>{0}, sortant</translation>
        </message>
        <message>
            <source>{0}, whole machine</source>
            <translation>{0}, toute la machine</translation>
        </message>
        <message>
            <source>Token of step {0}: {1}</source>
            <translation>Token de l’étape {0} : {1}</translation>
        </message>
        <message>
            <source>{0} tokens at {1}/s</source>
            <translation>{0} tokens à {1}/s</translation>
        </message>
        <message>
            <source>{0} hits per token</source>
            <translation>{0} succès par token</translation>
        </message>
        <message>
            <source>{0} fetched</source>
            <translation>{0} transférés</translation>
        </message>
        <message>
            <source>{0} on the CPU</source>
            <translation>{0} sur le processeur</translation>
        </message>
        <message>
            <source>layer {0}</source>
            <translation>couche {0}</translation>
        </message>
        <message>
            <source>expert {0}</source>
            <translation>expert {0}</translation>
        </message>
        <message>
            <source>{0} {1} tokens</source>
            <translation>{0} {1} tokens</translation>
        </message>
        <message>
            <source>This comes from a sensor or driver, not from the engine.</source>
            <translation>Ceci vient d’un capteur ou d’un pilote, pas du moteur.</translation>
        </message>
        <message>
            <source>sampling and bookkeeping</source>
            <translation>échantillonnage et gestion</translation>
        </message>
        <message>
            <source>experts</source>
            <translation>experts</translation>
        </message>
        <message>
            <source>attention</source>
            <translation>attention</translation>
        </message>
        <message>
            <source>hit</source>
            <translation>succès</translation>
        </message>
        <message>
            <source>fetched</source>
            <translation>transféré</translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>writing</source>
            <translation>écrit</translation>
        </message>
        <message>
            <source>reading</source>
            <translation>lit</translation>
        </message>
        <message>
            <source>waiting</source>
            <translation>en attente</translation>
        </message>
        <message>
            <source>in the background</source>
            <translation>en arrière-plan</translation>
        </message>
        <message>
            <source>written</source>
            <translation>écrits</translation>
        </message>
        <message>
            <source>read</source>
            <translation>lus</translation>
        </message>
        <message>
            <source>of jobs</source>
            <translation>de tâches</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} sur {1}</translation>
        </message>
        <message>
            <source>Move through time</source>
            <translation>Se déplacer dans le temps</translation>
        </message>
        <message>
            <source>Move by almost a full view</source>
            <translation>Se déplacer de presque une vue entière</translation>
        </message>
        <message>
            <source>Zoom in, zoom out</source>
            <translation>Agrandir, réduire</translation>
        </message>
        <message>
            <source>Space</source>
            <translation>Espace</translation>
        </message>
        <message>
            <source>Freeze the view, or follow live</source>
            <translation>Figer la vue, ou suivre en direct</translation>
        </message>
        <message>
            <source>Home</source>
            <translation>Origine</translation>
        </message>
        <message>
            <source>Go back to now</source>
            <translation>Revenir à maintenant</translation>
        </message>
        <message>
            <source>Move the crosshair; with Shift, farther</source>
            <translation>Déplacer le réticule ; avec Maj, plus loin</translation>
        </message>
        <message>
            <source>Select the previous or next token</source>
            <translation>Sélectionner le token précédent ou suivant</translation>
        </message>
        <message>
            <source>Select a range</source>
            <translation>Sélectionner une plage</translation>
        </message>
        <message>
            <source>Enter</source>
            <translation>Entrée</translation>
        </message>
        <message>
            <source>Zoom to the selected token or range</source>
            <translation>Zoomer sur le token ou la plage sélectionnés</translation>
        </message>
        <message>
            <source>Esc</source>
            <translation>Échap</translation>
        </message>
        <message>
            <source>Clear the selection</source>
            <translation>Effacer la sélection</translation>
        </message>
        <message>
            <source>waiting for {0}</source>
            <translation>attend {0}</translation>
        </message>
        <message>
            <source>written at {0} ×{1}</source>
            <translation>écrit sur {0} ×{1}</translation>
        </message>
        <message>
            <source>ceiling {0} GB/s</source>
            <translation>plafond {0} Go/s</translation>
        </message>
        <message>
            <source>token ticks</source>
            <translation>repères de tokens</translation>
        </message>
    </context>
    <context>
        <name>TimelineCard</name>
        <message>
            <source>Hover to read every lane, drag to average, wheel or ↑ ↓ to zoom, ← → to move.</source>
            <translation>Survolez pour lire chaque piste, glissez pour la moyenne, molette ou ↑ ↓ pour zoomer, ← → pour se déplacer.</translation>
        </message>
        <message>
            <source>Machine</source>
            <translation>Machine</translation>
        </message>
        <message>
            <source>Lanes of the machine's own sensors, below the engine's</source>
            <translation>Pistes des capteurs de la machine, sous celles du moteur</translation>
        </message>
        <message>
            <source>Show the machine's sensors</source>
            <translation>Afficher les capteurs de la machine</translation>
        </message>
        <message>
            <source>Timeline as a table</source>
            <translation>Chronologie en tableau</translation>
        </message>
        <message>
            <source>Table</source>
            <translation>Tableau</translation>
        </message>
        <message>
            <source>The same lanes as numbers</source>
            <translation>Les mêmes pistes en chiffres</translation>
        </message>
        <message>
            <source>Show the lanes as a table</source>
            <translation>Afficher les pistes en tableau</translation>
        </message>
    </context>
    <context>
        <name>TimelineStrip</name>
        <message>
            <source>Machine activity</source>
            <translation>Activité de la machine</translation>
        </message>
        <message>
            <source>The last 20 seconds. Click for the Monitor.</source>
            <translation>Les 20 dernières secondes. Cliquez pour ouvrir le Moniteur.</translation>
        </message>
    </context>
    <context>
        <name>TimelineView</name>
        <message>
            <source>Timeline</source>
            <translation>Chronologie</translation>
        </message>
        <message>
            <source>Arrow keys move and zoom, Space freezes, Home returns to now, comma and full stop move the crosshair, square brackets step through tokens, Enter zooms to a token. The table has the same data as text.</source>
            <translation>Les flèches déplacent et zooment, Espace fige, Origine revient à maintenant, la virgule et le point déplacent le réticule, les crochets vont de token en token, Entrée zoome sur un token. Le tableau contient les mêmes données en texte.</translation>
        </message>
        <message>
            <source>now</source>
            <translation>direct</translation>
        </message>
    </context>
    <context>
        <name>TitleBar</name>
        <message>
            <source>Model: {0}</source>
            <translation>Modèle : {0}</translation>
        </message>
        <message>
            <source>Cancel loading</source>
            <translation>Annuler le chargement</translation>
        </message>
        <message>
            <source>Start a new chat</source>
            <translation>Commencer une nouvelle discussion</translation>
        </message>
        <message>
            <source>New chat</source>
            <translation>Nouvelle discussion</translation>
        </message>
        <message>
            <source>Ctrl N</source>
            <translation>Ctrl N</translation>
        </message>
        <message>
            <source>Chats  Ctrl+K</source>
            <translation>Discussions  Ctrl+K</translation>
        </message>
        <message>
            <source>List of chats</source>
            <translation>Liste des discussions</translation>
        </message>
        <message>
            <source>Double-click or press F2 to rename</source>
            <translation>Double-cliquez ou appuyez sur F2 pour renommer</translation>
        </message>
        <message>
            <source>engine stopped</source>
            <translation>moteur arrêté</translation>
        </message>
        <message>
            <source>engine not responding</source>
            <translation>le moteur ne répond pas</translation>
        </message>
        <message>
            <source>loading {0}</source>
            <translation>chargement de {0}</translation>
        </message>
        <message>
            <source>starting the engine</source>
            <translation>démarrage du moteur</translation>
        </message>
        <message>
            <source>no model loaded</source>
            <translation>aucun modèle chargé</translation>
        </message>
        <message>
            <source>tuned</source>
            <translation>optimisé</translation>
        </message>
        <message>
            <source>server not in the list</source>
            <translation>serveur absent de la liste</translation>
        </message>
        <message>
            <source>its only model</source>
            <translation>son seul modèle</translation>
        </message>
        <message>
            <source>{0} · sent to {1}</source>
            <translation>{0} · envoyé à {1}</translation>
        </message>
        <message>
            <source>the model</source>
            <translation>le modèle</translation>
        </message>
        <message>
            <source>{0} experts per layer, {1} per token</source>
            <translation>{0} experts par couche, {1} par token</translation>
        </message>
        <message>
            <source>Speed: of the last answer</source>
            <translation>Vitesse : de la dernière réponse</translation>
        </message>
    </context>
    <context>
        <name>TokenCard</name>
        <message>
            <source>Per token</source>
            <translation>Par token</translation>
        </message>
        <message>
            <source>What one token, a word or a part of one, costs on average. Of the experts that it used, a hit was already in the graphics card’s memory; a miss was fetched or computed on the processor.</source>
            <translation>Ce que coûte en moyenne un token, un mot ou une partie de mot. Parmi les experts utilisés, un succès était déjà dans la mémoire de la carte graphique ; un défaut a été transféré ou calculé sur le processeur.</translation>
        </message>
        <message>
            <source>Experts used</source>
            <translation>Experts utilisés</translation>
        </message>
        <message>
            <source>in VRAM (hit)</source>
            <translation>en VRAM (succès)</translation>
        </message>
        <message>
            <source>fetched (miss)</source>
            <translation>transféré (défaut)</translation>
        </message>
        <message>
            <source>on the CPU</source>
            <translation>sur le processeur</translation>
        </message>
        <message>
            <source>Time</source>
            <translation>Heure</translation>
        </message>
        <message>
            <source>To the GPU</source>
            <translation>Vers le GPU</translation>
        </message>
        <message>
            <source>From disk</source>
            <translation>Depuis le disque</translation>
        </message>
        <message>
            <source>Energy</source>
            <translation>Énergie</translation>
        </message>
        <message>
            <source>{0} ms</source>
            <translation>{0} ms</translation>
        </message>
        <message>
            <source>{0} J</source>
            <translation>{0} J</translation>
        </message>
        <message>
            <source>not available here</source>
            <translation>indisponible ici</translation>
        </message>
        <message>
            <source>Neither a graphics card nor the processor reports its power here (NVML, RAPL).</source>
            <translation>Ni carte graphique ni processeur n’indique sa consommation ici (NVML, RAPL).</translation>
        </message>
        <message>
            <source>Power as graphics cards and processors report it, over the tokens' time; now {0} W.</source>
            <translation>Consommation indiquée par les cartes graphiques et processeurs, sur la durée des tokens ; maintenant {0} W.</translation>
        </message>
        <message>
            <source>Mean of the last {0} tokens</source>
            <translation>Moyenne des {0} derniers tokens</translation>
        </message>
        <message>
            <source>Mean of the last {0} batch tokens, {1} per step</source>
            <translation>Moyenne des {0} derniers tokens de lots, {1} par étape</translation>
        </message>
    </context>
    <context>
        <name>TokenDialog</name>
        <message>
            <source>Save and download</source>
            <translation>Enregistrer et télécharger</translation>
        </message>
        <message>
            <source>Access to {0}</source>
            <translation>Accès à {0}</translation>
        </message>
        <message>
            <source>1. Open the page of {0}, sign in, and accept what is asked there.</source>
            <translation>1. Ouvrez la page de {0}, connectez-vous et acceptez ce qui y est demandé.</translation>
        </message>
        <message>
            <source>Open {0}</source>
            <translation>Ouvrir {0}</translation>
        </message>
        <message>
            <source>2. Create an access token (reading is enough) in your settings there, and paste it here.</source>
            <translation>2. Créez un jeton d’accès (la lecture suffit) dans vos paramètres là-bas, et collez-le ici.</translation>
        </message>
        <message>
            <source>Access token</source>
            <translation>Jeton d’accès</translation>
        </message>
        <message>
            <source>Its makers ask you to accept their terms first</source>
            <translation>Ses auteurs demandent d’abord d’accepter leurs conditions</translation>
        </message>
        <message>
            <source>It is kept in the system's keyring, or for this run only where there is none, and sent to {0} alone.</source>
            <translation>Il est gardé dans le trousseau du système, ou jusqu’à la fermeture seulement s’il n’y en a pas, et envoyé uniquement à {0}.</translation>
        </message>
    </context>
    <context>
        <name>TokenRows</name>
        <message>
            <source>Remove token</source>
            <translation>Supprimer le jeton</translation>
        </message>
        <message>
            <source>Remove the token for {0}</source>
            <translation>Supprimer le jeton pour {0}</translation>
        </message>
    </context>
    <context>
        <name>ToolServerDialog</name>
        <message>
            <source>Save</source>
            <translation>Enregistrer</translation>
        </message>
        <message>
            <source>Test</source>
            <translation>Tester</translation>
        </message>
        <message>
            <source>Add a server with tools</source>
            <translation>Ajouter un serveur d’outils</translation>
        </message>
        <message>
            <source>Name</source>
            <translation>Nom</translation>
        </message>
        <message>
            <source>for example files</source>
            <translation>par exemple fichiers</translation>
        </message>
        <message>
            <source>Command</source>
            <translation>Commande</translation>
        </message>
        <message>
            <source>or address</source>
            <translation>ou adresse</translation>
        </message>
        <message>
            <source>Variables or headers</source>
            <translation>Variables ou en-têtes</translation>
        </message>
        <message>
            <source>NAME=value, one on each line</source>
            <translation>NOM=valeur, un par ligne</translation>
        </message>
        <message>
            <source>Values are kept in the system's keyring, or for this run only where there is none. ${NAME} in a value is read from the environment.</source>
            <translation>Les valeurs sont gardées dans le trousseau du système, ou jusqu’à la fermeture seulement s’il n’y en a pas. ${NAME} dans une valeur est lu dans l’environnement.</translation>
        </message>
        <message>
            <source>or JSON</source>
            <translation>ou JSON</translation>
        </message>
        <message>
            <source>The command has a quote that does not end: correct it.</source>
            <translation>La commande a un guillemet qui n’est pas fermé : corrigez-la.</translation>
        </message>
        <message>
            <source>Each variable or header is NAME=value, on a line of its own.</source>
            <translation>Chaque variable ou en-tête s’écrit NOM=valeur, sur sa propre ligne.</translation>
        </message>
        <message>
            <source>Enter the variables or headers again: they are kept for the old command or address alone.</source>
            <translation>Saisissez de nouveau les variables ou en-têtes : ils sont gardés pour l’ancienne commande ou adresse uniquement.</translation>
        </message>
        <message>
            <source>There is a server named {0}: choose another name.</source>
            <translation>Il y a déjà un serveur nommé {0} : choisissez un autre nom.</translation>
        </message>
        <message>
            <source>Starting…</source>
            <translation>Démarrage…</translation>
        </message>
    </context>
    <context>
        <name>Tools</name>
        <message numerus="yes">
            <source>It answers: {0} tools.</source>
            <translation>
                <numerusform>Il répond : {0} outil.</numerusform>
                <numerusform>Il répond : {0} outils.</numerusform>
            </translation>
        </message>
        <message>
            <source>not allowed</source>
            <translation>non autorisé</translation>
        </message>
        <message>
            <source>failed</source>
            <translation>échec</translation>
        </message>
        <message>
            <source>done in {0}</source>
            <translation>terminé en {0}</translation>
        </message>
        <message>
            <source>stopped</source>
            <translation>arrêté</translation>
        </message>
        <message>
            <source>running…</source>
            <translation>en cours…</translation>
        </message>
        <message>
            <source>waits for you</source>
            <translation>vous attend</translation>
        </message>
    </context>
    <context>
        <name>ToolsCard</name>
        <message>
            <source>Tools</source>
            <translation>Outils</translation>
        </message>
        <message>
            <source>Calculator</source>
            <translation>Calculatrice</translation>
        </message>
        <message>
            <source>Computes what models get wrong. Runs without asking.</source>
            <translation>Calcule ce que les modèles calculent mal. S’exécute sans demander.</translation>
        </message>
        <message>
            <source>Clock</source>
            <translation>Horloge</translation>
        </message>
        <message>
            <source>Tells the date and the time. Runs without asking.</source>
            <translation>Donne la date et l’heure. S’exécute sans demander.</translation>
        </message>
        <message>
            <source>Read a file</source>
            <translation>Lire un fichier</translation>
        </message>
        <message>
            <source>Of folders that are attached to the chat.</source>
            <translation>Dans les dossiers joints à la discussion.</translation>
        </message>
        <message>
            <source>Run a batch</source>
            <translation>Exécuter un lot</translation>
        </message>
        <message>
            <source>Starts a job that answers a prompt for each of many rows.</source>
            <translation>Lance une tâche qui répond à un prompt pour chacune de nombreuses lignes.</translation>
        </message>
        <message>
            <source>Search documents</source>
            <translation>Chercher dans les documents</translation>
        </message>
        <message>
            <source>Those that are attached to the chat. Runs without asking.</source>
            <translation>Ceux qui sont joints à la discussion. S’exécute sans demander.</translation>
        </message>
        <message>
            <source>Offered to the model in chats where the switch at the message box is on. Before a tool runs you are asked, unless you allowed it.</source>
            <translation>Proposés au modèle dans les discussions où l’interrupteur de la zone de message est activé. Avant qu’un outil s’exécute, on vous demande, sauf si vous l’avez autorisé.</translation>
        </message>
        <message>
            <source>Ask again for all</source>
            <translation>Redemander pour tous</translation>
        </message>
        <message>
            <source>Always allowed</source>
            <translation>Toujours autorisés</translation>
        </message>
        <message>
            <source>Add…</source>
            <translation>Ajouter…</translation>
        </message>
        <message>
            <source>Add a server with tools</source>
            <translation>Ajouter un serveur d’outils</translation>
        </message>
        <message>
            <source>Programs or addresses that bring tools by the Model Context Protocol, such as a web search. A program runs on this PC with your rights: add only what you trust.</source>
            <translation>Programmes ou adresses qui apportent des outils par le Model Context Protocol, comme une recherche web. Un programme s’exécute sur ce PC avec vos droits : n’ajoutez que ce en quoi vous avez confiance.</translation>
        </message>
        <message>
            <source>MCP servers</source>
            <translation>Serveurs MCP</translation>
        </message>
        <message>
            <source>No tool yet.</source>
            <translation>Aucun outil pour l’instant.</translation>
        </message>
        <message>
            <source>Offer the tools of {0}</source>
            <translation>Proposer les outils de {0}</translation>
        </message>
        <message>
            <source>Edit…</source>
            <translation>Modifier…</translation>
        </message>
        <message>
            <source>Edit {0}</source>
            <translation>Modifier {0}</translation>
        </message>
        <message>
            <source>Remove</source>
            <translation>Supprimer</translation>
        </message>
        <message>
            <source>Remove {0}</source>
            <translation>Supprimer {0}</translation>
        </message>
        <message>
            <source>Its variables or headers are known for this run only: this system has no keyring.</source>
            <translation>Ses variables ou en-têtes sont gardés jusqu’à la fermeture seulement : ce système n’a pas de trousseau.</translation>
        </message>
        <message>
            <source>Its tools are asked for when a chat needs them.</source>
            <translation>Ses outils sont demandés quand une discussion en a besoin.</translation>
        </message>
        <message>
            <source>It offers no tools; its prompts and resources are not used here.</source>
            <translation>Il n’offre pas d’outils ; ses prompts et ressources ne sont pas utilisés ici.</translation>
        </message>
        <message numerus="yes">
            <source>{0} tools: {1}</source>
            <translation>
                <numerusform>{0} outil : {1}</numerusform>
                <numerusform>{0} outils : {1}</numerusform>
            </translation>
        </message>
    </context>
    <context>
        <name>Transcript</name>
        <message>
            <source>Conversation</source>
            <translation>Conversation</translation>
        </message>
        <message>
            <source>Jump to the latest</source>
            <translation>Aller au plus récent</translation>
        </message>
    </context>
    <context>
        <name>Tray</name>
        <message>
            <source>Switchyard is still running</source>
            <translation>Switchyard est toujours actif</translation>
        </message>
        <message>
            <source>Its window is hidden; the icon here opens it, asks a question, or quits.</source>
            <translation>Sa fenêtre est masquée ; l’icône ici l’ouvre, pose une question ou quitte.</translation>
        </message>
        <message>
            <source>Quick question…</source>
            <translation>Question rapide…</translation>
        </message>
        <message>
            <source>Open Switchyard</source>
            <translation>Ouvrir Switchyard</translation>
        </message>
        <message>
            <source>Quit</source>
            <translation>Quitter</translation>
        </message>
    </context>
    <context>
        <name>Tune</name>
        <message>
            <source>measured on this machine</source>
            <translation>mesuré sur cette machine</translation>
        </message>
        <message>
            <source>reported by the driver or the system</source>
            <translation>indiqué par le pilote ou le système</translation>
        </message>
        <message>
            <source>assumed, from data sheets</source>
            <translation>supposé, d’après les fiches techniques</translation>
        </message>
        <message>
            <source>about {0}</source>
            <translation>environ {0}</translation>
        </message>
        <message>
            <source>just measured</source>
            <translation>mesuré à l’instant</translation>
        </message>
        <message>
            <source>The CPU computes everything.</source>
            <translation>Le processeur calcule tout.</translation>
        </message>
        <message>
            <source>{0} is part of the processor</source>
            <translation>{0} fait partie du processeur</translation>
        </message>
        <message>
            <source>No graphics card</source>
            <translation>Pas de carte graphique</translation>
        </message>
        <message>
            <source>not used by the engine</source>
            <translation>non utilisée par le moteur</translation>
        </message>
        <message>
            <source>reported by the engine</source>
            <translation>indiqué par le moteur</translation>
        </message>
        <message>
            <source>and {0} more: {1}</source>
            <translation>et {0} autres : {1}</translation>
        </message>
        <message>
            <source>GPU</source>
            <translation>GPU</translation>
        </message>
        <message>
            <source>{0}, emulated in RAM</source>
            <translation>{0}, émulée en RAM</translation>
        </message>
        <message>
            <source>{0}, {1} free</source>
            <translation>{0}, {1} libres</translation>
        </message>
        <message>
            <source>driver {0}</source>
            <translation>pilote {0}</translation>
        </message>
        <message>
            <source>1 core</source>
            <translation>1 cœur</translation>
        </message>
        <message numerus="yes">
            <source>{0} cores</source>
            <translation>
                <numerusform>{0} cœur</numerusform>
                <numerusform>{0} cœurs</numerusform>
            </translation>
        </message>
        <message>
            <source>best with 1 thread</source>
            <translation>optimal avec 1 thread</translation>
        </message>
        <message numerus="yes">
            <source>best with {0} threads</source>
            <translation>
                <numerusform>optimal avec {0} thread</numerusform>
                <numerusform>optimal avec {0} threads</numerusform>
            </translation>
        </message>
        <message>
            <source>CPU</source>
            <translation>CPU</translation>
        </message>
        <message>
            <source>the container's limit</source>
            <translation>la limite du conteneur</translation>
        </message>
        <message>
            <source>the limit set for WSL</source>
            <translation>la limite fixée pour WSL</translation>
        </message>
        <message>
            <source>pinnable: {0}</source>
            <translation>verrouillable : {0}</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>It does not respond.</source>
            <translation>Ne répond pas.</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Disque</translation>
        </message>
        <message>
            <source>{0} free</source>
            <translation>{0} libres</translation>
        </message>
        <message>
            <source>hard disk</source>
            <translation>disque dur</translation>
        </message>
        <message>
            <source>network share</source>
            <translation>partage réseau</translation>
        </message>
        <message>
            <source>in memory</source>
            <translation>en mémoire</translation>
        </message>
        <message>
            <source>disk of the host</source>
            <translation>disque de l’hôte</translation>
        </message>
        <message>
            <source>disk</source>
            <translation>disque</translation>
        </message>
        <message>
            <source>{0} up</source>
            <translation>{0} montant</translation>
        </message>
        <message>
            <source>{0} down</source>
            <translation>{0} descendant</translation>
        </message>
        <message>
            <source>reading RAM</source>
            <translation>lecture de la RAM</translation>
        </message>
        <message>
            <source>Looking up the hardware</source>
            <translation>Examen du matériel</translation>
        </message>
        <message>
            <source>Waiting for other programs, which use {0} of the CPU</source>
            <translation>En attente d’autres programmes, qui utilisent {0} du processeur</translation>
        </message>
        <message>
            <source>Measuring {0}</source>
            <translation>Mesure : {0}</translation>
        </message>
        <message>
            <source>Measuring</source>
            <translation>Mesure</translation>
        </message>
        <message>
            <source>Planning</source>
            <translation>Planification</translation>
        </message>
        <message>
            <source>Loading: {0}</source>
            <translation>Chargement : {0}</translation>
        </message>
        <message>
            <source>Timing real tokens: {0}</source>
            <translation>Mesure de vrais tokens : {0}</translation>
        </message>
        <message>
            <source>Loading {0} again</source>
            <translation>Rechargement de {0}</translation>
        </message>
        <message>
            <source>Reading RAM</source>
            <translation>Lecture de la RAM</translation>
        </message>
        <message>
            <source>CPU arithmetic</source>
            <translation>Calcul du processeur</translation>
        </message>
        <message>
            <source>Experts on the CPU</source>
            <translation>Experts sur le processeur</translation>
        </message>
        <message>
            <source>GPU arithmetic</source>
            <translation>Calcul du GPU</translation>
        </message>
        <message>
            <source>Reading VRAM</source>
            <translation>Lecture de la VRAM</translation>
        </message>
        <message>
            <source>Experts on the GPU</source>
            <translation>Experts sur le GPU</translation>
        </message>
        <message>
            <source>RAM to the card</source>
            <translation>RAM vers la carte</translation>
        </message>
        <message>
            <source>Card to RAM</source>
            <translation>Carte vers la RAM</translation>
        </message>
        <message>
            <source>Reading the disk</source>
            <translation>Lecture du disque</translation>
        </message>
        <message>
            <source>Decoding</source>
            <translation>Décodage</translation>
        </message>
        <message>
            <source>{0} tokens/s</source>
            <translation>{0} tokens/s</translation>
        </message>
        <message>
            <source>About {0} tokens/s</source>
            <translation>Environ {0} tokens/s</translation>
        </message>
        <message>
            <source>predicted, {0} to {1} on an idle machine; first token after about {2} s</source>
            <translation>prévu, {0} à {1} sur une machine au repos ; premier token après environ {2} s</translation>
        </message>
        <message>
            <source>measured with real tokens on {0}</source>
            <translation>mesuré avec de vrais tokens sur {0}</translation>
        </message>
        <message>
            <source>{0}: use this figure. The prediction was {1}, {2}% too high: it adds up what memory and processor can do, and leaves out the engine's overhead.</source>
            <translation>{0} : fiez-vous à ce chiffre. La prévision était {1}, {2} % trop haute : elle additionne ce que mémoire et processeur peuvent faire, sans le coût propre du moteur.</translation>
        </message>
        <message>
            <source>{0}: use this figure. The prediction was {1}, {2}% too low: it is based on memory and processor measured one at a time, and together they are faster.</source>
            <translation>{0} : fiez-vous à ce chiffre. La prévision était {1}, {2} % trop basse : elle repose sur la mémoire et le processeur mesurés séparément, et ensemble ils sont plus rapides.</translation>
        </message>
        <message>
            <source>1 thread</source>
            <translation>1 thread</translation>
        </message>
        <message numerus="yes">
            <source>{0} threads</source>
            <translation>
                <numerusform>{0} thread</numerusform>
                <numerusform>{0} threads</numerusform>
            </translation>
        </message>
        <message>
            <source>all experts on the card</source>
            <translation>tous les experts sur la carte</translation>
        </message>
        <message>
            <source>{0} expert slots</source>
            <translation>{0} emplacements d’experts</translation>
        </message>
        <message>
            <source>about {0}% hits</source>
            <translation>environ {0} % de succès</translation>
        </message>
        <message>
            <source>Not enough disk space: {0} of experts need it, and {1} are free.</source>
            <translation>Pas assez d’espace disque : {0} d’experts en ont besoin, et {1} sont libres.</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>experts read on demand</source>
            <translation>experts lus à la demande</translation>
        </message>
        <message>
            <source>layers read for each token</source>
            <translation>couches lues pour chaque token</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Modèle de départ</translation>
        </message>
    </context>
    <context>
        <name>TuneCards</name>
        <message>
            <source>Your machine</source>
            <translation>Votre machine</translation>
        </message>
        <message>
            <source>Wider links have more bandwidth; hollow ones are assumed.</source>
            <translation>Les liaisons plus larges ont plus de débit ; les creuses sont supposées.</translation>
        </message>
        <message>
            <source>Looking up the hardware…</source>
            <translation>Examen du matériel…</translation>
        </message>
        <message>
            <source>Where to compute</source>
            <translation>Où calculer</translation>
        </message>
    </context>
    <context>
        <name>TunePage</name>
        <message>
            <source>Tune</source>
            <translation>Optimiser</translation>
        </message>
        <message>
            <source>What if…</source>
            <translation>Et si…</translation>
        </message>
        <message>
            <source>Copy report</source>
            <translation>Copier le rapport</translation>
        </message>
        <message>
            <source>Dismiss</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>Cancel tuning</source>
            <translation>Annuler l’optimisation</translation>
        </message>
        <message>
            <source>Your hardware has changed since the last tuning. {0} Tune again.</source>
            <translation>Votre matériel a changé depuis la dernière optimisation. {0} Optimisez de nouveau.</translation>
        </message>
        <message>
            <source>Starter</source>
            <translation>Modèle de départ</translation>
        </message>
        <message>
            <source>Copied</source>
            <translation>Copié</translation>
        </message>
    </context>
    <context>
        <name>UnsavedTextGuard</name>
        <message>
            <source>The latest messages are not saved.</source>
            <translation>Les derniers messages ne sont pas enregistrés.</translation>
        </message>
        <message>
            <source>If you close the window now, they are lost.</source>
            <translation>Si vous fermez la fenêtre maintenant, ils sont perdus.</translation>
        </message>
        <message>
            <source>Keep the window open</source>
            <translation>Garder la fenêtre ouverte</translation>
        </message>
        <message>
            <source>Close and lose them</source>
            <translation>Fermer et les perdre</translation>
        </message>
    </context>
    <context>
        <name>Updates</name>
        <message>
            <source>The installation was stopped. Nothing has changed: try again.</source>
            <translation>L’installation a été interrompue. Rien n’a changé : réessayez.</translation>
        </message>
    </context>
    <context>
        <name>UpdatesCard</name>
        <message>
            <source>Check now</source>
            <translation>Vérifier maintenant</translation>
        </message>
        <message>
            <source>Download</source>
            <translation>Télécharger</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>Switchyard {0}</source>
            <translation>Switchyard {0}</translation>
        </message>
        <message>
            <source>Go back</source>
            <translation>Revenir</translation>
        </message>
        <message>
            <source>Previous version</source>
            <translation>Version précédente</translation>
        </message>
        <message>
            <source>the official one</source>
            <translation>le serveur officiel</translation>
        </message>
        <message>
            <source>Where newer versions come from. Only versions signed by Switchyard's developers are installed.</source>
            <translation>D’où viennent les versions plus récentes. Seules celles que les développeurs de Switchyard ont signées sont installées.</translation>
        </message>
        <message>
            <source>Update server</source>
            <translation>Serveur de mises à jour</translation>
        </message>
        <message>
            <source>{0} is kept. Going back takes effect at the next start.</source>
            <translation>{0} est conservée. Le retour prend effet au prochain démarrage.</translation>
        </message>
        <message>
            <source>There is none.</source>
            <translation>Il n’y en a pas.</translation>
        </message>
        <message>
            <source>{0} is available ({1}).</source>
            <translation>{0} est disponible ({1}).</translation>
        </message>
        <message>
            <source>Not checked yet.</source>
            <translation>Pas encore vérifié.</translation>
        </message>
        <message>
            <source>Checking…</source>
            <translation>Vérification…</translation>
        </message>
        <message>
            <source>This is the newest version.</source>
            <translation>Ceci est la version la plus récente.</translation>
        </message>
        <message>
            <source>Downloading {0}…</source>
            <translation>Téléchargement de {0}…</translation>
        </message>
        <message>
            <source>{0} will be installed when answers and jobs are done.</source>
            <translation>{0} sera installée quand les réponses et tâches seront terminées.</translation>
        </message>
        <message>
            <source>Installing and testing {0}…</source>
            <translation>Installation et test de {0}…</translation>
        </message>
        <message>
            <source>Restart Switchyard to use the other version.</source>
            <translation>Redémarrez Switchyard pour utiliser l’autre version.</translation>
        </message>
        <message>
            <source>Nothing has changed.</source>
            <translation>Rien n’a changé.</translation>
        </message>
    </context>
    <context>
        <name>UserMessage</name>
        <message>
            <source>Copy</source>
            <translation>Copier</translation>
        </message>
        <message>
            <source>Edit the message</source>
            <translation>Modifier le message</translation>
        </message>
        <message>
            <source>Ask this of every row of a file</source>
            <translation>Demander ceci pour chaque ligne d’un fichier</translation>
        </message>
        <message>
            <source>Delete this message</source>
            <translation>Supprimer ce message</translation>
        </message>
        <message>
            <source>You: {0}</source>
            <translation>Vous : {0}</translation>
        </message>
        <message>
            <source>Edit message</source>
            <translation>Modifier le message</translation>
        </message>
        <message>
            <source>Cancel</source>
            <translation>Annuler</translation>
        </message>
        <message>
            <source>Save</source>
            <translation>Enregistrer</translation>
        </message>
        <message>
            <source>Changes the message; the answers after it stay.</source>
            <translation>Modifie le message ; les réponses qui suivent restent.</translation>
        </message>
        <message>
            <source>Send as new version</source>
            <translation>Renvoyer</translation>
        </message>
    </context>
    <context>
        <name>VersionSwitch</name>
        <message>
            <source>Earlier version</source>
            <translation>Version antérieure</translation>
        </message>
        <message>
            <source>Later version</source>
            <translation>Version ultérieure</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} sur {1}</translation>
        </message>
    </context>
    <context>
        <name>Versions</name>
        <message>
            <source>You started Switchyard {0}, and this window is {1}: close it, then start the other.</source>
            <translation>Vous avez lancé Switchyard {0}, et cette fenêtre est {1} : fermez-la, puis lancez l’autre.</translation>
        </message>
    </context>
    <context>
        <name>WhatIfCard</name>
        <message>
            <source>What if this machine had…</source>
            <translation>Et si cette machine avait…</translation>
        </message>
        <message>
            <source>A few letters, such as 4090</source>
            <translation>Quelques lettres, comme 4090</translation>
        </message>
        <message>
            <source>Graphics card as it is</source>
            <translation>Carte graphique actuelle</translation>
        </message>
        <message>
            <source> GB of VRAM</source>
            <translation> Go de VRAM</translation>
        </message>
        <message>
            <source>VRAM as it is</source>
            <translation>VRAM actuelle</translation>
        </message>
        <message>
            <source> GB of RAM</source>
            <translation> Go de RAM</translation>
        </message>
        <message>
            <source>RAM as it is</source>
            <translation>RAM actuelle</translation>
        </message>
        <message>
            <source> GB/s to the card</source>
            <translation> Go/s vers la carte</translation>
        </message>
        <message>
            <source>Link as it is</source>
            <translation>Liaison actuelle</translation>
        </message>
        <message>
            <source> GB/s from disk</source>
            <translation> Go/s du disque</translation>
        </message>
        <message>
            <source>Disk as it is</source>
            <translation>Disque actuel</translation>
        </message>
        <message>
            <source>Graphics card</source>
            <translation>Carte graphique</translation>
        </message>
        <message>
            <source>VRAM</source>
            <translation>VRAM</translation>
        </message>
        <message>
            <source>RAM</source>
            <translation>RAM</translation>
        </message>
        <message>
            <source>Link to the card</source>
            <translation>Liaison avec la carte</translation>
        </message>
        <message>
            <source>Disk</source>
            <translation>Disque</translation>
        </message>
        <message>
            <source>Reset</source>
            <translation>Réinitialiser</translation>
        </message>
        <message>
            <source>Close</source>
            <translation>Fermer</translation>
        </message>
        <message>
            <source>Change something above to see its effect.</source>
            <translation>Changez quelque chose ci-dessus pour voir l’effet.</translation>
        </message>
        <message>
            <source>The link needs a graphics card: choose one first.</source>
            <translation>La liaison a besoin d’une carte graphique : choisissez-en une d’abord.</translation>
        </message>
        <message>
            <source>Planning…</source>
            <translation>Planification…</translation>
        </message>
        <message>
            <source>It would fit, at about {0} tokens/s</source>
            <translation>Cela tiendrait, à environ {0} tokens/s</translation>
        </message>
        <message>
            <source>About {1} tokens/s: as fast as now</source>
            <translation>Environ {1} tokens/s : aussi rapide que maintenant</translation>
        </message>
        <message>
            <source>{0} tokens/s now, measured → about {1} predicted, {2} times as fast</source>
            <translation>{0} tokens/s maintenant, mesurés → environ {1} prévus, {2} fois plus rapide</translation>
        </message>
        <message>
            <source>About {0} → about {1} tokens/s, {2} times as fast</source>
            <translation>Environ {0} → environ {1} tokens/s, {2} fois plus rapide</translation>
        </message>
    </context>
    <context>
        <name>WorkLine</name>
        <message>
            <source>Stop</source>
            <translation>Arrêter</translation>
        </message>
    </context>
    <context>
        <name>WorkerProcess</name>
        <message>
            <source>The engine sent an invalid message: {0}</source>
            <translation>Le moteur a envoyé un message non valide : {0}</translation>
        </message>
        <message>
            <source>The engine could not be started ({0}): reinstall Switchyard.</source>
            <translation>Le moteur n’a pas pu démarrer ({0}) : réinstallez Switchyard.</translation>
        </message>
    </context>
    <context>
        <name>_GpuRow</name>
        <message>
            <source>Busy</source>
            <translation>Charge</translation>
        </message>
        <message>
            <source>VRAM: ours; hatched: other programs</source>
            <translation>VRAM : la nôtre ; hachuré : autres programmes</translation>
        </message>
        <message>
            <source>GPU {0}</source>
            <translation>GPU {0}</translation>
        </message>
        <message>
            <source>{0}% busy</source>
            <translation>occupé à {0} %</translation>
        </message>
        <message>
            <source>{0} of {1}</source>
            <translation>{0} sur {1}</translation>
        </message>
        <message>
            <source>not responding</source>
            <translation>ne répond pas</translation>
        </message>
        <message>
            <source>{0} GHz</source>
            <translation>{0} GHz</translation>
        </message>
        <message>
            <source>memory {0} GHz</source>
            <translation>mémoire {0} GHz</translation>
        </message>
        <message>
            <source>{0} W</source>
            <translation>{0} W</translation>
        </message>
        <message>
            <source>{0} °C</source>
            <translation>{0} °C</translation>
        </message>
        <message>
            <source>PCIe {0} in, {1} out GB/s</source>
            <translation>PCIe {0} entrant, {1} sortant Go/s</translation>
        </message>
        <message>
            <source>slowed by {0}</source>
            <translation>ralenti par {0}</translation>
        </message>
    </context>
</TS>
